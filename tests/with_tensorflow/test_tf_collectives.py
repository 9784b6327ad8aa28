# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape on TensorFlow's tensors, in eager mode and inside
tf.function, against NumPy on all ranks' data."""

import functools

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import farandole as fd
import farandole.tensorflow as hvd
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


@pytest.fixture(params=["eager", "function"])
def within(request):
    """Runs a function of tensors as it is, or as a graph."""
    return tf.function if request.param == "function" else lambda function: function


def everyone(shape, dtype, salt=0):
    return [data(rank, shape, dtype, salt) for rank in range(hvd.size())]


def results(within, functions, inputs):
    """Of each function, for each tensor: one by one, or in one graph."""
    mine = [tf.constant(x[hvd.rank()]) for x in inputs]
    found = within(lambda *xs: [[function(x) for x in xs] for function in functions])(*mine)
    for x, each in zip(mine, inputs, strict=True):
        assert_same(x, each[hvd.rank()])  # only read
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(dtype, within):
    inputs = [everyone(shape, dtype) for shape in SHAPES]
    ops = ops_of(dtype)
    reduce = [functools.partial(hvd.allreduce, op=getattr(hvd, op)) for op in ops]
    for op, found in zip(ops, results(within, reduce, inputs), strict=True):
        for result, each in zip(found, inputs, strict=True):
            assert isinstance(result, tf.Tensor)
            assert_same(result, reduced(op, each), is_exact(dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(dtype, within):
    root = hvd.size() - 1
    inputs = [everyone(shape, dtype, salt=3) for shape in SHAPES]
    (found,) = results(within, [functools.partial(hvd.broadcast, root_rank=root)], inputs)
    for result, each in zip(found, inputs, strict=True):
        assert_same(result, each[root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_of_different_rows(dtype, within):
    inputs = [
        [data(r, (3 * (r % 2) + r, *rest), dtype) for r in range(hvd.size())]
        for rest in [(), (5,), (0,)]
    ]
    (found,) = results(within, [hvd.allgather], inputs)
    for result, each in zip(found, inputs, strict=True):
        assert_same(result, np.concatenate(each))


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_reducescatter(dtype, within):
    inputs, ops = [everyone(shape, dtype) for shape in [(0,), (1,), (7, 3), (1000,)]], OPS[:2]
    reduce = [functools.partial(hvd.reducescatter, op=getattr(hvd, op)) for op in ops]
    for op, found in zip(ops, results(within, reduce, inputs), strict=True):
        for result, each in zip(found, inputs, strict=True):
            expected = reduced(op, each)[rows_of(hvd.rank(), len(each[0]), hvd.size())]
            assert_same(result, expected, is_exact(dtype, op))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "bool"])
def test_alltoall(dtype, within):
    size, rank = hvd.size(), hvd.rank()
    splits = [[(sender + to) % 3 for to in range(size)] for sender in range(size)]
    inputs = [data(r, (sum(splits[r]) + 2, 3), dtype) for r in range(size)]  # 2 rows stay
    parts = []
    for sender in range(size):
        begin = sum(splits[sender][:rank])
        parts.append(inputs[sender][begin : begin + splits[sender][rank]])
    call = within(hvd.alltoall)
    output, received = call(tf.constant(inputs[rank]), tf.constant(splits[rank]))
    assert_same(output, np.concatenate(parts))
    assert received.dtype == tf.int32
    assert received.numpy().tolist() == [splits[sender][rank] for sender in range(size)]
    even = np.arange(2 * size) + 100 * rank
    wanted = [np.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)]
    assert_same(call(tf.constant(even)), np.concatenate(wanted))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name, within):
    dtype = getattr(ml_dtypes, name)
    mine = tf.constant(np.asarray([1.0, 2.0, hvd.rank()], dtype))
    total = within(lambda x: hvd.allreduce(x, op=hvd.Sum))(mine)
    assert total.dtype == mine.dtype
    n = hvd.size()
    assert np.asarray(total).astype("f4").tolist() == [n, 2 * n, n * (n - 1) / 2]
    rows = within(hvd.allgather)(mine)
    expected = [x for r in range(n) for x in (1.0, 2.0, r)]
    assert np.asarray(rows).astype("f4").tolist() == expected


def test_a_group_of_several_dtypes_and_factors(within):
    n, rank = hvd.size(), hvd.rank()
    xs = [tf.fill([3], rank + 1.0), tf.fill([2, 2], rank), tf.constant(rank, tf.float64)]
    call = within(lambda *xs: hvd.grouped_allreduce(xs, op=hvd.Sum, prescale_factor=2.0))
    first, second, third = call(*xs)
    assert first.numpy().tolist() == [n * (n + 1.0)] * 3
    assert second.dtype == tf.int32
    assert second.numpy().tolist() == [[n * (n - 1)] * 2] * 2
    assert third.numpy() == n * (n - 1)
    assert hvd.grouped_allreduce([]) == []
    again = hvd.grouped_allreduce((x for x in xs), op=hvd.Sum)
    assert again[0].numpy().tolist() == [n * (n + 1) / 2] * 3


def test_adasum(within):
    mine = np.array([1.0, hvd.rank()])
    result = within(lambda x: hvd.allreduce(x, op=hvd.Adasum))(tf.constant(mine))
    np.testing.assert_array_equal(result, fd.allreduce(mine, op=fd.Adasum))


def test_compression(within):
    x = tf.constant([1.0, 2.0 + hvd.rank()])
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        call = within(lambda x, c=compression: hvd.allreduce(x, compression=c, op=hvd.Sum))
        result = call(x)
        assert result.dtype == tf.float32
        n = hvd.size()
        assert result.numpy().tolist() == [n, 2 * n + n * (n - 1) / 2]


def test_indexed_slices(within):
    n, rank = hvd.size(), hvd.rank()
    values, indices = tf.fill([rank + 1, 2], rank + 1.0), tf.range(rank + 1)

    def call(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([n, 2]))
        result = hvd.allreduce(slices, op=hvd.Sum)
        assert isinstance(result, tf.IndexedSlices)
        return tf.convert_to_tensor(result), hvd.allreduce(slices).values

    with pytest.raises(ValueError, match="integers can be summed only"):
        hvd.allreduce(tf.IndexedSlices(indices, indices))
    total, means = within(call)(values, indices)
    expected = [sum(r + 1.0 for r in range(row, n)) for row in range(n)]
    assert total.numpy()[:, 1].tolist() == expected
    assert means.shape[0] == n * (n + 1) // 2
    np.testing.assert_allclose(means.numpy()[-1], 1.0)


def test_neutral_calls_take_tensors_and_variables():
    n = hvd.size()
    result = fd.allreduce(tf.Variable([1.0, hvd.rank()]), op=fd.Sum)
    assert isinstance(result, tf.Tensor)
    assert result.numpy().tolist() == [n, n * (n - 1) / 2]
    with pytest.raises(ValueError, match="can't be changed in place"):
        fd.allreduce_(tf.ones(2))
    with pytest.raises(TypeError, match="dtype object cannot be sent"):
        fd.allreduce(tf.constant("text"))


def test_barrier_join_and_objects(within):
    within(lambda: hvd.barrier() and None)()
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    for _ in range(hvd.rank()):
        call = within(lambda x: hvd.allreduce(x, op=hvd.Sum, name="tail"))
        call(tf.ones(2))
    assert hvd.join() == hvd.size() - 1


def test_broadcast_variables(within):
    root = hvd.size() - 1
    variables = [tf.Variable(tf.fill([2, 3], float(hvd.rank()))), tf.Variable(hvd.rank())]
    within(lambda: hvd.broadcast_variables(variables, root_rank=root))()
    assert variables[0].numpy().tolist() == [[root] * 3] * 2
    assert variables[1].numpy() == root


def test_results_are_not_copied():
    """Nor are inputs: memory of the core and of NumPy becomes a tensor's."""
    from farandole.tensorflow.kind import TensorFlowKind

    kind, x = TensorFlowKind(), tf.ones(1000)
    buffer = kind.describe(x)
    assert np.asarray(memoryview(x)).ctypes.data == buffer.pointer
    made = kind.empty(x)
    assert np.asarray(memoryview(kind.sealed(made, x))).ctypes.data == made.ctypes.data
