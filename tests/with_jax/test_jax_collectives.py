# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape on JAX's arrays, outside of jit and within it,
against NumPy on all ranks' data."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import farandole.jax as hvd
from harness.arrays import DTYPES
from harness.collectives import COMPILED, NARROW, Compiled, narrow


@pytest.fixture(autouse=True, scope="module")
def _wide():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def library(within):
    return Compiled(hvd, jnp.asarray, jax.Array, within, fixed=within is jax.jit)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
@pytest.mark.parametrize("check", COMPILED, ids=lambda check: check.__name__)
def test_collective(check, dtype, library):
    check(library, dtype)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats(name, library):
    narrow(library, name)


def test_splits_are_refused_within_jit():
    splits = [1] * hvd.size()
    with pytest.raises(ValueError, match="leave splits out for equal parts"):
        jax.jit(lambda x: hvd.alltoall(x, splits))(jnp.ones(hvd.size()))


def test_trees_are_one_group(within):
    tree = {"w": jnp.full((2, 3), hvd.rank(), "float32"), "b": [jnp.int32(hvd.rank()), 1.5]}
    total = sum(range(hvd.size()))
    result = within(lambda x: hvd.allreduce(x, op=hvd.Sum, name="tree"))(tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert np.asarray(result["w"]).tolist() == [[total] * 3] * 2
    assert (int(result["b"][0]), float(result["b"][1])) == (total, 1.5 * hvd.size())
    assert within(hvd.allreduce)({}) == {}
    sent = within(lambda x: hvd.broadcast(x, hvd.size() - 1))(tree)
    assert int(sent["b"][0]) == hvd.size() - 1


def test_process_sets(within):
    if hvd.size() < 3:
        pytest.skip("a set of some ranks")
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        reduce = within(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))
        assert reduce(jnp.ones(3) * hvd.rank()).tolist() == [2.0] * 3
        own = within(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=pair))(jnp.arange(5))
        assert own.tolist() == [[0, 2, 4], [], [6, 8]][hvd.rank()]
    else:
        with pytest.raises(ValueError, match="not in process set"):
            jax.jit(lambda x: hvd.reducescatter(x, process_set=pair))(jnp.arange(5))
    hvd.remove_process_set(pair)


def test_asynchronous_calls_outside_of_jit():
    x = jnp.arange(5.0) + hvd.rank()
    handles = [hvd.allreduce_async(x * i, op=hvd.Sum, name=f"async.{i}") for i in range(8)]
    del x
    for i, handle in reversed(list(enumerate(handles))):
        total = i * (np.arange(5.0) * hvd.size() + sum(range(hvd.size())))
        assert isinstance(handle.wait(), jax.Array)
        np.testing.assert_array_equal(handle.wait(), total)
    hvd.allreduce_async(jnp.ones(1000), name="dropped")  # its result is dropped
    hvd.barrier()
    assert hvd.join() in range(hvd.size())
