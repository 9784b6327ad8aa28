# SPDX-License-Identifier: Apache-2.0
"""Derivatives of collectives against one process that has all ranks' data: of the sum of all ranks'
losses, by each rank's own input."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import farandole.jax as hvd

pytestmark = pytest.mark.ranks(1, 3)

ROWS = 12  # every number of ranks divides it


def all_inputs():
    return [
        jnp.asarray(np.random.default_rng(r).normal(size=(ROWS, 2)), "float32")
        for r in range(hvd.size())
    ]


def all_weights(shapes):
    """What each rank multiplies its result with."""
    pairs = enumerate(shapes)
    return [jnp.asarray(np.random.default_rng([7, r]).normal(size=s), "float32") for r, s in pairs]


def rows_of(rank, rows=ROWS):
    size = hvd.size()
    counts = [rows // size + (r < rows % size) for r in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def one_process(operation, xs, root):
    """All ranks' results, from all ranks' inputs."""
    size = len(xs)
    results = {
        "sum": lambda: [2.0 * sum(0.5 * x for x in xs)] * size,
        "average": lambda: [sum(xs) / size] * size,
        "allgather": lambda: [jnp.concatenate(xs)] * size,
        "broadcast": lambda: [xs[root]] * size,
        "reducescatter": lambda: [sum(xs)[rows_of(r)] for r in range(size)],
        "uneven": lambda: [3.0 * (sum(xs)[:11] / size)[rows_of(r, 11)] for r in range(size)],
        "alltoall": lambda: [jnp.concatenate([x[rows_of(r)] for x in xs]) for r in range(size)],
    }
    return results[operation]()


def many_ranks(operation, x, root, name):
    calls = {
        "sum": lambda: hvd.allreduce(
            x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0, name=name
        ),
        "average": lambda: hvd.allreduce(x, name=name),
        "allgather": lambda: hvd.allgather(x, name=name),
        "broadcast": lambda: hvd.broadcast(x, root, name=name),
        "reducescatter": lambda: hvd.reducescatter(x, op=hvd.Sum, name=name),
        "uneven": lambda: hvd.reducescatter(x[:11], postscale_factor=3.0, name=name),
        "alltoall": lambda: hvd.alltoall(x, name=name),
    }
    return calls[operation]()


OPERATIONS = [
    *("sum", "average", "allgather", "broadcast", "reducescatter", "uneven", "alltoall"),
]


@pytest.mark.parametrize("name", [None, "named"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_derivatives(operation, within, name):
    xs, own, root = all_inputs(), hvd.rank(), hvd.size() - 1
    weights = all_weights([y.shape for y in one_process(operation, xs, root)])

    def whole_loss(xs):
        ys = one_process(operation, xs, root)
        return sum(jnp.sum(w * jnp.sin(y)) for w, y in zip(weights, ys, strict=True))

    def my_loss(x):
        return jnp.sum(weights[own] * jnp.sin(many_ranks(operation, x, root, name)))

    def forward(x):
        return jax.jvp(my_loss, (x,), (jnp.cos(x),))

    value, found = within(jax.value_and_grad(my_loss))(xs[own])
    expected = jax.grad(whole_loss)(xs)[own]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        hvd.allreduce(value, op=hvd.Sum), whole_loss(xs), rtol=1e-4, atol=1e-5
    )
    _, slope = within(forward)(xs[own])
    _, whole_slope = jax.jvp(whole_loss, (xs,), ([jnp.cos(x) for x in xs],))
    np.testing.assert_allclose(hvd.allreduce(slope, op=hvd.Sum), whole_slope, rtol=1e-4, atol=1e-5)


def test_a_factor_that_float16_lacks(within):
    """The gradient of 2^14 is not 0."""
    x, small = jnp.full((hvd.size(), 1), 1.0, "float16"), 2.0**-26

    def loss(x):
        y = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=small, postscale_factor=2.0)
        return jnp.sum(y * jnp.float16(2.0**14))

    found = within(jax.grad(loss))(x)
    assert found.dtype == jnp.float16
    assert found.tolist() == [[2.0**-11]] * hvd.size()


@pytest.mark.parametrize("operation", ["sum", "broadcast"])
def test_second_derivatives(within, operation):
    xs, own, root = [x[:2, 0] for x in all_inputs()], hvd.rank(), hvd.size() - 1

    def my_loss(x):
        return jnp.sum(jnp.sin(many_ranks(operation, x, root, None)) ** 2)

    def whole_loss(xs):
        return sum(jnp.sum(jnp.sin(y) ** 2) for y in one_process(operation, xs, root))

    def twice(loss):
        return lambda x: jax.grad(lambda y: jnp.sum(jax.grad(loss)(y)))(x)

    # d/dx of the sum over ranks r of the elements of dL/dx_r: one process has them in one sum.
    expected = jax.grad(lambda xs: sum(jnp.sum(g) for g in jax.grad(whole_loss)(xs)))(xs)[own]
    np.testing.assert_allclose(within(twice(my_loss))(xs[own]), expected, rtol=1e-4, atol=1e-5)


def test_a_group_with_integers_and_what_does_not_matter(within):
    def loss(tree):
        found = hvd.allreduce(tree, op=hvd.Sum)
        return jnp.sum(found["w"] ** 2) * found["count"]  # "unused" gets zeros

    tree = {"w": jnp.ones(3), "unused": jnp.ones(2), "count": jnp.int32(hvd.rank() + 1)}
    counts = sum(range(1, hvd.size() + 1))
    found = within(jax.grad(loss, allow_int=True))(tree)
    assert found["w"].tolist() == [2.0 * hvd.size() * counts * hvd.size()] * 3
    assert found["unused"].tolist() == [0.0] * 2
    assert found["count"].dtype == jax.dtypes.float0


def test_arrays_of_a_group_have_different_rows(within):
    size = hvd.size()
    arrays = [jnp.ones((rows * size, 2)) * (hvd.rank() + 1) for rows in (2, 1, 3)]

    def loss(xs):
        ys = hvd.reducescatter(xs, op=hvd.Sum)
        return sum((i + 1) * jnp.sum(y**2) / 2 for i, y in enumerate(ys))

    # Gradients are linear in the arrays, so their derivative along the arrays is the same.
    for found in within(lambda xs: jax.jvp(jax.grad(loss), (xs,), (xs,)))(arrays):
        for i, (x, gradient) in enumerate(zip(arrays, found, strict=True)):
            each = (i + 1) * sum(range(1, size + 1))
            np.testing.assert_allclose(gradient, jnp.full_like(x, each))


def test_a_largest_value_has_no_derivative():
    for op in (hvd.Max, hvd.Product):
        with pytest.raises(NotImplementedError, match="Average and Sum only"):
            jax.grad(lambda x, op=op: jnp.sum(hvd.allreduce(x, op=op)))(jnp.ones(3))
    largest = jax.jit(
        jax.grad(lambda x: jnp.sum(x * hvd.allreduce(jax.lax.stop_gradient(x), op=hvd.Max)))
    )
    assert largest(jnp.full(2, 1.0 + hvd.rank())).tolist() == [hvd.size()] * 2
