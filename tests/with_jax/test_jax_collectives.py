# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape on JAX's arrays, outside of jit and within it,
against NumPy on all ranks' data."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp

import farandole.jax as hvd
from harness.arrays import (
    DTYPES,
    FLOATS,
    OPS,
    assert_same,
    data,
    is_exact,
    ops_of,
    reduced,
    rows_of,
)

SHAPES = [(), (1,), (7,), (3, 5), (0,), (4, 0), (20_003,)]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(autouse=True, scope="module")
def _wide():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(params=["outside", "jit"])
def within(request):
    """Runs a function of arrays as it is, or compiled."""
    return jax.jit if request.param == "jit" else lambda function: function


def results(within, functions, inputs):
    """Of each function, for each array: one by one, or, as compiling takes long, in one program."""
    mine = [jnp.asarray(x[hvd.rank()]) for x in inputs]
    return within(lambda xs: [[function(x) for x in xs] for function in functions])(mine)


def everyone(shape, dtype, salt=0):
    return [data(rank, shape, dtype, salt) for rank in range(hvd.size())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(dtype, within):
    inputs, ops = [everyone(shape, dtype) for shape in SHAPES], ops_of(dtype)
    reduce = [functools.partial(hvd.allreduce, op=getattr(hvd, op)) for op in ops]
    for op, found in zip(ops, results(within, reduce, inputs), strict=True):
        for result, each in zip(found, inputs, strict=True):
            assert isinstance(result, jax.Array)
            assert_same(result, reduced(op, each), is_exact(dtype, op))


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats_are_summed_in_float32(name, within):
    dtype = getattr(ml_dtypes, name)
    inputs = [np.arange(24, dtype=np.float32).reshape(4, 6) / 4 + r for r in range(hvd.size())]
    mine = jnp.asarray(inputs[hvd.rank()].astype(dtype))
    result = within(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"narrow.{name}"))(mine)
    rounded = sum(x.astype(dtype).astype(np.float32) for x in inputs).astype(dtype)
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result), rounded)
    gathered = within(lambda x: hvd.allgather(x))(mine)
    np.testing.assert_array_equal(np.asarray(gathered), np.concatenate(inputs).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(dtype, within):
    inputs, roots = [everyone(shape, dtype, salt=3) for shape in SHAPES], (0, hvd.size() - 1)
    send = [functools.partial(hvd.broadcast, root_rank=root) for root in roots]
    for root, found in zip(roots, results(within, send, inputs), strict=True):
        for result, each in zip(found, inputs, strict=True):
            assert_same(result, each[root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather(dtype, within):
    inputs = [everyone(shape, dtype) for shape in SHAPES[1:]]
    (found,) = results(within, [hvd.allgather], inputs)
    for result, each in zip(found, inputs, strict=True):
        assert_same(result, np.concatenate(each))


@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_rows_outside_of_jit(dtype):
    inputs = [data(r, (1000 * (r % 2) + r, 3), dtype) for r in range(hvd.size())]
    assert_same(hvd.allgather(jnp.asarray(inputs[hvd.rank()])), np.concatenate(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reducescatter(dtype, within):
    inputs = [everyone(shape, dtype) for shape in [(0,), (1, 3), (7,), (1000, 3)]]
    ops = ops_of(dtype, OPS[:3])
    reduce = [functools.partial(hvd.reducescatter, op=getattr(hvd, op)) for op in ops]
    for op, found in zip(ops, results(within, reduce, inputs), strict=True):
        for result, each in zip(found, inputs, strict=True):
            expected = reduced(op, each)[rows_of(hvd.rank(), len(each[0]), hvd.size())]
            assert_same(result, expected, is_exact(dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall(dtype, within):
    size, rank = hvd.size(), hvd.rank()
    inputs = everyone((3 * size, 2), dtype)
    mine = jnp.asarray(inputs[rank])
    part = slice(3 * rank, 3 * rank + 3)
    assert_same(within(hvd.alltoall)(mine), np.concatenate([x[part] for x in inputs]))


def test_splits_outside_of_jit():
    size, rank = hvd.size(), hvd.rank()
    splits = [[(sender + to) % 3 for to in range(size)] for sender in range(size)]
    inputs = [data(r, (sum(splits[r]), 2), "float32") for r in range(size)]
    starts = [sum(splits[r][:rank]) for r in range(size)]
    rows = zip(inputs, starts, splits, strict=True)
    expected = np.concatenate([x[start : start + each[rank]] for x, start, each in rows])
    output, received = hvd.alltoall(jnp.asarray(inputs[rank]), splits[rank])
    assert_same(output, expected)
    assert received.tolist() == [each[rank] for each in splits]
    with pytest.raises(ValueError, match="leave it out for equal parts"):
        jax.jit(lambda x: hvd.alltoall(x, splits[rank]))(inputs[rank])


@pytest.mark.parametrize("dtype", FLOATS)
def test_factors(dtype, within):
    inputs = everyone((1000,), dtype)
    reduce = within(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.25, postscale_factor=2.0)
    )
    expected = reduced("Sum", [x * np.array(0.25, dtype) for x in inputs]) * np.array(2, dtype)
    assert_same(reduce(inputs[hvd.rank()]), expected)


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
