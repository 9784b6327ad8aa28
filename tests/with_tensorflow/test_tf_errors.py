# SPDX-License-Identifier: Apache-2.0
"""Nonsense on one rank, in eager mode and inside tf.function: our error's text on every rank, soon,
and then life goes on."""

import numpy as np
import pytest
import tensorflow as tf

import farandole.tensorflow as hvd
from farandole.tensorflow.rows import table_like

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(autouse=True)
def _still_usable():
    yield
    x, total = tf.fill([3], hvd.rank() + 1.0), hvd.size() * (hvd.size() + 1) / 2
    call = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="after"))
    for _ in range(2):
        assert call(x).numpy().tolist() == [total] * 3
        assert hvd.allreduce(x, op=hvd.Sum).numpy().tolist() == [total] * 3


def is_last():
    return hvd.rank() == hvd.size() - 1


MISMATCHES = {
    "shape": lambda x, name: hvd.allreduce(x[: 3 + is_last()], name=name),
    "dtype": lambda x, name: hvd.allreduce(tf.cast(x, "int32") if is_last() else x, name=name),
    "op": lambda x, name: hvd.allreduce(x, op=hvd.Max if is_last() else hvd.Sum, name=name),
    "root": lambda x, name: hvd.broadcast(x, int(is_last()), name=name),
    "number of tensors": lambda x, name: hvd.grouped_allreduce([x] * (2 + is_last()), name=name),
    "rows' shape": lambda x, name: hvd.allgather(
        tf.reshape(x[:6], (2, 3) if is_last() else (3, 2)), name=name
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatches(what, within):
    call = within(lambda x: MISMATCHES[what](x, f"disputed.{what}"))
    with pytest.raises(Exception, match=r"MismatchError: |ranks|rank \d") as caught:
        call(tf.ones(8))
    assert isinstance(caught.value, (hvd.MismatchError, tf.errors.OpError))
    assert f"disputed.{what}" in str(caught.value)
    assert "MismatchError" in f"{type(caught.value)} {caught.value}"


def test_farandole_s_own_classes():
    call = tf.function(lambda x: hvd.allreduce(x[: 3 + is_last()], name="typed"))
    with pytest.raises(hvd.MismatchError, match=r"^ranks disagree") as caught, hvd.typed_errors():
        call(tf.ones(9))
    assert "Traceback" not in str(caught.value)
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    with pytest.raises(tf.errors.InvalidArgumentError), hvd.typed_errors():
        tf.debugging.assert_positive(-1.0)


def test_a_mismatch_among_many_nodes():
    @tf.function
    def step(x):
        ys = [hvd.allreduce(x, name=f"many.{i}") for i in range(10)]
        ys.append(hvd.allreduce(x[: 2 + is_last()], name="many.wrong"))
        return ys + [hvd.allreduce(x, name=f"more.{i}") for i in range(10)]

    with pytest.raises(tf.errors.OpError, match=r"MismatchError: .*many\.wrong"):
        step(tf.ones(4))


@pytest.mark.parametrize("name", [None, "refused"])
def test_a_wrong_argument_on_one_rank(name, within):
    def step(x):
        op = "sum" if is_last() else hvd.Sum
        return hvd.allreduce(x, op=op, name=name)

    with pytest.raises((TypeError, hvd.FarandoleError, tf.errors.OpError)) as caught:
        within(step)(tf.ones(4))
    assert "op is 'sum', of type str: pass one of Average, Sum" in str(caught.value)


def test_a_text_on_one_rank(within):
    x = tf.constant("text") if is_last() else tf.ones(4)
    with pytest.raises((TypeError, hvd.FarandoleError, tf.errors.OpError)) as caught:
        within(lambda x: hvd.allreduce(x, name="a text"))(x)
    assert "cannot be sent; supported: " in str(caught.value)


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)])
def test_tensors_of_several_parts_on_one_rank(call, within):
    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[1.0, 0.0]])
    for one in (ragged, sparse):
        x = one if is_last() else tf.ones(4)
        text = r"a (Ragged|Sparse)Tensor can't become a dense tensor: pass a tf\.Tensor"
        with pytest.raises((TypeError, hvd.FarandoleError, tf.errors.OpError), match=text):
            within(call)(x)


def test_wrong_splits_on_one_rank(within):
    splits = tf.constant([-1 if is_last() else 1] + [1] * (hvd.size() - 1))
    with pytest.raises((ValueError, hvd.FarandoleError, tf.errors.OpError), match="splits"):
        within(lambda x, s: hvd.alltoall(x, s, name="split")[0])(tf.ones(8), splits)


def test_errors_of_the_program_between_two_calls():
    """A rank that raises between two nodes; it goes on, as the others do, with another call."""

    @tf.function
    def step(x):
        y = hvd.allreduce(x, name="before")
        checked = tf.debugging.assert_positive(y - hvd.size(), message="my bug")
        with tf.control_dependencies([checked]):
            return tf.identity(y)

    with pytest.raises(tf.errors.InvalidArgumentError, match="my bug"):
        step(tf.ones(4))


def test_counts_beyond_int32_are_refused():
    """A wrapped number would be negative, and a gradient would go astray."""
    result = np.zeros(0)
    assert table_like(result, [2**31 - 1, hvd.rank()], np.int32).tolist() == [2**31 - 1, hvd.rank()]
    with pytest.raises(ValueError, match="2147483656 rows came from one member"):
        table_like(result, [hvd.rank(), 2**31 + 8], np.int32)
