# SPDX-License-Identifier: Apache-2.0
"""Gradients of collectives, also while some ranks have joined."""

import numpy as np
import pytest
import tensorflow as tf

import farandole.tensorflow as hvd
from harness.gradients import CASES
from harness.joins import in_turns

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def check(case, active, within):
    rows, call, right = CASES[case](active)
    x = tf.Variable(np.repeat(np.arange(1.0, rows + 1) + 100 * hvd.rank(), 3).reshape(rows, 3))

    def differentiated():
        with tf.GradientTape() as tape:
            y = call(hvd, tf.convert_to_tensor(x))
            weights = tf.range(tf.shape(y)[0])  # harness.gradients.weight
            weights = tf.cast(weights, "float64") + 1.0 + 100.0 * hvd.rank()
            loss = tf.reduce_sum(y * weights[:, None])
        return tape.gradient(loss, x)

    found = within(differentiated)()
    assert found.shape == x.shape
    np.testing.assert_allclose(found, np.repeat(right, 3).reshape(rows, 3))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_all_ranks(case, within):
    check(case, list(range(hvd.size())), within)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
@in_turns
def test_gradients(active, case, within):
    check(case, active, within)


@pytest.mark.ranks(2, 3, 4)
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
