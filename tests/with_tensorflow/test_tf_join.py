# SPDX-License-Identifier: Apache-2.0
"""Gradients while some ranks have joined: what was sent to them has a gradient of zeros, at its own
place."""

import numpy as np
import pytest
import tensorflow as tf

import farandole.tensorflow as hvd
from harness.joins import in_turns

pytestmark = pytest.mark.ranks(2, 3, 4)


def leaf(rows):
    return tf.Variable(np.arange(3.0 * rows).reshape(rows, 3) + 100 * hvd.rank())


def gradient_of(x, call, within):
    """Of the sum of `call(x)`, weighted by its row and this rank."""

    def differentiated():
        with tf.GradientTape() as tape:
            y = call(tf.convert_to_tensor(x))
            weights = tf.range(1.0, tf.cast(tf.shape(y)[0], "float64") + 1, dtype="float64")
            loss = tf.reduce_sum(y * (weights + 100 * hvd.rank())[:, None])
        return tape.gradient(loss, x)

    found = within(differentiated)()
    assert found.shape == x.shape
    np.testing.assert_array_equal(found[:, 0], found[:, 2])
    return found[:, 0].numpy().tolist()


@in_turns
def test_allgather(active, within):
    own = hvd.rank()
    before = sum(rank + 1 for rank in active if rank < own)
    total = [sum(before + i + 1 + 100 * rank for rank in active) for i in range(own + 1)]
    call = lambda x: hvd.grouped_allgather([x, x[:1]], name="all")[0]  # noqa: E731
    got = gradient_of(leaf(own + 1), call, within)
    assert got == pytest.approx([one / hvd.size() for one in total])


@pytest.mark.parametrize("given", [False, True])
@in_turns
def test_alltoall(active, given, within):
    size, place = hvd.size(), active.index(hvd.rank())
    splits = [to + 1 if given else 2 for to in range(size)]
    unsent = 3 if given else 0

    def call(x):
        if not given:
            return hvd.alltoall(x, name="x")
        y, rows = hvd.alltoall(x, tf.constant(splits), name="x")
        tf.debugging.assert_equal(
            rows, [splits[hvd.rank()] if rank in active else 0 for rank in range(size)]
        )
        return y

    expected = []
    for to in range(size):
        at = place * splits[to] + 100 * to  # of this rank's rows in the result of `to`
        expected += [at + i + 1.0 if to in active else 0.0 for i in range(splits[to])]
    got = gradient_of(leaf(sum(splits) + unsent), call, within)
    assert got == expected + [0.0] * unsent


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@in_turns
def test_reducescatter(active, op, within):
    size = hvd.size()
    factor = size if op == hvd.Sum else 1  # as in Horovod
    sent = [
        factor * (i + 1.0 + 100 * to) if to in active else 0.0
        for to in range(size)
        for i in range(1 if to == size - 1 else 2)
    ]
    call = lambda x: hvd.reducescatter(x, name="x", op=op)  # noqa: E731
    assert gradient_of(leaf(2 * size - 1), call, within) == sent


@in_turns
def test_reductions(active, within):
    size, own, root = hvd.size(), hvd.rank(), active[0]
    mean = [sum(i + 1.0 + 100 * rank for rank in active) / size for i in range(2)]
    got = gradient_of(leaf(2), lambda x: hvd.allreduce(x, name="x"), within)
    assert got == pytest.approx(mean)
    got = gradient_of(leaf(2), lambda x: hvd.broadcast(x, root, name="x"), within)
    assert got == pytest.approx(mean if own == root else [0.0, 0.0])


@in_turns
def test_slices_and_roots_that_have_joined(active, within):
    size, own = hvd.size(), hvd.rank()

    def averaged():
        mine = tf.IndexedSlices(tf.fill([1, 2], own + 1.0), tf.constant([own]), (size, 2))
        return tf.convert_to_tensor(hvd.allreduce(mine, name="rows"))

    rows = [(rank + 1.0) / size if rank in active else 0.0 for rank in range(size)]
    assert within(averaged)()[:, 0].numpy().tolist() == pytest.approx(rows)
    gone = next(rank for rank in range(size) if rank not in active)
    call = within(lambda x: hvd.broadcast(x, gone, name="x"))
    with pytest.raises((ValueError, tf.errors.OpError), match=f"root rank {gone} .*has joined"):
        call(tf.ones(2))
