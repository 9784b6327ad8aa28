# SPDX-License-Identifier: Apache-2.0
"""Training with optax on all ranks: equal to one process that has the whole batch."""

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from sklearn.datasets import load_digits

import farandole.jax as hvd

pytestmark = pytest.mark.ranks(1, 3)

EPOCHS, BATCH = 3, 96  # rows of all ranks together


def model(seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "hidden": {"w": 0.1 * jax.random.normal(keys[0], (64, 16)), "b": jnp.zeros(16)},
        "out": {"w": 0.1 * jax.random.normal(keys[1], (16, 10)), "b": jnp.zeros(10)},
    }


def loss(params, x, y):
    h = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = h @ params["out"]["w"] + params["out"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def digits():
    x, y = load_digits(return_X_y=True)
    return jnp.asarray(x[:960] / 16, "float32"), jnp.asarray(y[:960])


def train(optimizer, params, batches, gradient=jax.value_and_grad):
    @jax.jit
    def step(params, state, x, y):
        value, grads = gradient(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for _ in range(EPOCHS):
        for x, y in batches:
            params, state, _ = step(params, state, x, y)
    return params


def batches(rank, size, passes=1):
    """This rank's parts of all batches; each in so many parts."""
    x, y = digits()
    rows = BATCH // size // passes
    for begin in range(0, len(x), BATCH):
        for i in range(passes):
            at = begin + (rank * passes + i) * rows
            yield x[at : at + rows], y[at : at + rows]


def assert_equal_everywhere(params):
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    assert len({tuple(each) for each in hvd.allgather_object(bits)}) == 1


def assert_close(params, expected, rtol=2e-3, atol=2e-4):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), params, expected
    )


OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1, momentum=0.9), "adamw": lambda: optax.adamw(1e-3)}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
def test_equal_to_one_process(kind, every):
    size, rank = hvd.size(), hvd.rank()
    params = hvd.broadcast_parameters(model(seed=rank), root_rank=0)
    optimizer = hvd.distributed(OPTIMIZERS[kind](), every=every)
    mine = list(batches(rank, size, passes=every))
    params = train(optimizer, params, mine)
    assert_equal_everywhere(params)
    assert_close(params, train(OPTIMIZERS[kind](), model(seed=0), list(batches(0, 1))))


def test_value_and_grad_and_grad():
    size, rank = hvd.size(), hvd.rank()
    params = train(optax.sgd(0.1), model(0), list(batches(rank, size)), hvd.value_and_grad)
    assert_equal_everywhere(params)
    assert_close(params, train(optax.sgd(0.1), model(0), list(batches(0, 1))))
    x, y = next(batches(rank, size))
    (value, aux), both = hvd.value_and_grad(lambda p: (loss(p, x, y), rank), has_aux=True)(params)
    only, again = hvd.grad(lambda p: (loss(p, x, y), rank), has_aux=True)(params)
    assert aux == again == rank
    assert float(value) == pytest.approx(float(loss(params, x, y)))
    jax.tree.map(np.testing.assert_array_equal, both, only)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(compression):
    chosen = getattr(hvd.Compression, compression)
    tree = {"w": jnp.linspace(0, 1, 50) + hvd.rank(), "n": jnp.int32(hvd.rank())}
    optimizer = hvd.distributed(optax.identity(), compression=chosen, op=hvd.Sum)
    updates, _ = jax.jit(optimizer.update)(tree, optimizer.init(tree))
    assert updates["w"].dtype == jnp.float32
    total = sum(range(hvd.size()))
    np.testing.assert_allclose(updates["w"], np.linspace(0, 1, 50) * hvd.size() + total, rtol=2e-2)
    assert int(updates["n"]) == total


def test_accumulation_sends_once():
    optimizer = hvd.distributed(optax.sgd(1.0), every=3, name="accumulated")
    params = {"w": jnp.zeros(4)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    before = hvd.metrics()["tensors_done"]
    found = []
    for i in range(6):
        updates, state = update({"w": jnp.full(4, float(hvd.rank() + i))}, state, params)
        found.append(float(updates["w"][0]))
    mean = sum(range(hvd.size())) / hvd.size()
    assert found == pytest.approx([0, 0, -mean - 1, 0, 0, -mean - 4])
    assert hvd.metrics()["tensors_done"] == before + 2


def test_accumulation_of_narrow_parameters():
    optimizer = hvd.distributed(optax.adam(0.1, mu_dtype="float32"), every=2)
    params = {"w": jnp.zeros(4, "bfloat16")}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in (jnp.ones(4), jnp.ones(4), jnp.ones(4, "bfloat16"), jnp.ones(4)):
        updates, state = update({"w": gradient}, state, params)
    assert float(updates["w"][0]) < 0
    assert state.gradients["w"].dtype == jnp.bfloat16


def test_parameters_and_states_of_a_root():
    if hvd.size() == 1:
        return
    optimizer = optax.adam(1e-3)
    params = model(seed=hvd.rank())
    state = optimizer.update(params, optimizer.init(params), params)[1]
    for root in range(hvd.size()):
        whole = hvd.broadcast_parameters((params, state, 3 + hvd.rank()), root)
        assert int(whole[2]) == 3 + root
        jax.tree.map(np.testing.assert_array_equal, whole[0], model(seed=root))
        assert jax.tree.structure(whole[1]) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="different parameters"):
        hvd.broadcast_parameters({"a": jnp.ones(2)} if hvd.rank() else {"b": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"string|text|not a valid"):
        hvd.broadcast_parameters({"a": "text"} if hvd.rank() == 0 else {"a": jnp.ones(2)})
    assert hvd.broadcast_object({"epoch": hvd.rank()}, 1) == {"epoch": 1}


def test_wrong_options():
    with pytest.raises(ValueError, match="every is 0"):
        hvd.distributed(optax.sgd(0.1), every=0)
    with pytest.raises(TypeError, match="op is 'mean'"):
        hvd.grad(loss, op="mean")
    with pytest.raises(TypeError, match="compression is 16"):
        hvd.distributed(optax.sgd(0.1), compression=16)
