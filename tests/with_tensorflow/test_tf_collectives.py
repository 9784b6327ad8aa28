# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape on TensorFlow's tensors, in eager mode and inside
tf.function, against NumPy on all ranks' data."""

import numpy as np
import pytest
import tensorflow as tf

import farandole as fd
import farandole.tensorflow as hvd
from harness.arrays import DTYPES
from harness.collectives import COMPILED, NARROW, Compiled, narrow


@pytest.fixture
def library(within):
    return Compiled(hvd, tf.constant, tf.Tensor, within)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
@pytest.mark.parametrize("check", COMPILED, ids=lambda check: check.__name__)
def test_collective(check, dtype, library):
    check(library, dtype)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats(name, library):
    narrow(library, name)


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_factors_of_indexed_slices(within, dtype):
    """Also a factor that the dtype lacks, such as one that undoes the scale of a loss."""
    n, rank, small = hvd.size(), hvd.rank(), 2.0**-26
    values = tf.cast([[rank + 1.0]], dtype) * 2.0**14

    def call(values):
        slices = tf.IndexedSlices(values, tf.constant([rank]), tf.constant([n, 1]))
        total = hvd.allreduce(slices, op=hvd.Sum, prescale_factor=small, postscale_factor=2.0)
        return tf.convert_to_tensor(total), tf.convert_to_tensor(hvd.allreduce(slices))

    total, mean = within(call)(values)
    assert total.dtype == values.dtype
    expected = np.arange(1.0, n + 1)[:, None] * 2.0**14
    np.testing.assert_array_equal(tf.cast(total, tf.complex64), expected * 2 * small)
    np.testing.assert_allclose(tf.cast(mean, tf.complex64), expected / n, rtol=4e-3)


def test_a_derivative_by_a_factor_that_float16_lacks(within):
    x, small = tf.fill([hvd.size(), 1], tf.constant(1.0, tf.float16)), 2.0**-26

    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=small, postscale_factor=2.0)
            loss = tf.reduce_sum(y * 2.0**14)
        return tape.gradient(loss, x)

    found = within(call)(x)
    assert found.dtype == tf.float16
    assert found.numpy().tolist() == [[hvd.size() * 2.0**-11]] * hvd.size()


@pytest.mark.parametrize("factors", [{"prescale_factor": 2.5}, {"postscale_factor": 0.5}])
def test_indexed_slices_of_integers_have_no_factors(factors):
    """A factor became an integer too, such as 0."""
    n, rank = hvd.size(), hvd.rank()
    slices = tf.IndexedSlices(tf.constant([[7 + rank]]), tf.constant([0]), tf.constant([1, 1]))
    with pytest.raises(ValueError, match="integers can be summed only: pass op=Sum and no factors"):
        hvd.allreduce(slices, op=hvd.Sum, **factors)
    total = tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum))
    assert total.numpy().tolist() == [[7 * n + n * (n - 1) // 2]]


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
