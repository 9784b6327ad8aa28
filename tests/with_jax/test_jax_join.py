# SPDX-License-Identifier: Apache-2.0
"""JAX while some ranks have joined. A program has fixed shapes, so a collective that would lack
rows is an error on all ranks."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import farandole as fd
import farandole.jax as hvd
from harness.joins import in_turns

pytestmark = pytest.mark.ranks(2, 3, 4)


def row(count):
    return jnp.arange(1.0, count + 1) + 100 * hvd.rank()


@in_turns
def test_reductions_go_on(active, within):
    size, own = hvd.size(), hvd.rank()
    mean = sum(np.arange(1.0, 2 * size) + 100 * rank for rank in active) / size
    np.testing.assert_allclose(within(hvd.allreduce)(row(2 * size - 1)), mean, rtol=1e-6)
    kept = within(hvd.reducescatter)(row(2 * size - 1))
    np.testing.assert_allclose(kept, mean[2 * own : 2 * own + 2], rtol=1e-6)
    root = active[-1]
    got = within(lambda x: hvd.broadcast(x, root))(row(3))
    np.testing.assert_array_equal(got, np.arange(1.0, 4) + 100 * root)


@in_turns
def test_gradients_of_reductions(active, within):
    size = hvd.size()
    weight = hvd.rank() + 1.0
    gradient = within(jax.grad(lambda x: (hvd.allreduce(x) * weight).sum()))(row(2))
    np.testing.assert_allclose(gradient, [sum(r + 1.0 for r in active) / size] * 2, rtol=1e-6)
    root = active[0]
    gradient = within(jax.grad(lambda x: (hvd.broadcast(x, root) * weight).sum()))(row(2))
    total = sum(rank + 1.0 for rank in active) if hvd.rank() == root else 0.0
    np.testing.assert_allclose(gradient, [total] * 2, rtol=1e-6)


LACK_ROWS = {
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "gradient of allgather": jax.grad(lambda x: hvd.allgather(x).sum()),
    "gradient of alltoall": jax.grad(lambda x: hvd.alltoall(x).sum()),
    "gradient of reducescatter": jax.grad(lambda x: hvd.reducescatter(x).sum()),
}


@pytest.mark.parametrize("case", LACK_ROWS)
@in_turns
def test_programs_that_would_lack_rows(active, case, within):
    call = LACK_ROWS[case]
    x = row(2 * hvd.size())
    if within is not jax.jit and not case.startswith("gradient"):
        assert len(call(x)) == {"allgather": len(x), "alltoall": 2}[case] * len(active)
        return
    with pytest.raises(fd.MismatchError, match="joined"), hvd.typed_errors():
        jax.block_until_ready(within(call)(x))


ROOTED = {
    "broadcast": lambda root: lambda x: hvd.broadcast(x, root),
}


@pytest.mark.parametrize("case", ROOTED)
@in_turns
def test_a_root_that_has_joined(active, case, within):
    gone = next(rank for rank in range(hvd.size()) if rank not in active)
    call = within(ROOTED[case](gone))
    says = f"root rank {gone} .*has joined: choose a different root"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=says):
        jax.block_until_ready(call(row(hvd.size())))
