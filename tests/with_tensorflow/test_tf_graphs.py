# SPDX-License-Identifier: Apache-2.0
"""tf.function: many collectives with one thread of TensorFlow, in any order that its executor may
choose; branches, loops, functions within functions, retracing, names."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import farandole.tensorflow as hvd
from farandole.calls.requests import Op
from farandole.tensorflow import graph
from farandole.tensorflow.graph import next_name

pytestmark = pytest.mark.ranks(1, 3)

MANY = 30


def total(x):
    return hvd.allreduce(x, op=hvd.Sum)


def mine(shape=3):
    return tf.fill([shape], hvd.rank() + 1.0)


def everyones():
    return hvd.size() * (hvd.size() + 1) / 2


def test_the_pool_has_one_thread():
    """Else this file would show little."""
    assert tf.config.threading.get_inter_op_parallelism_threads() == 1


def test_many_collectives_without_dependencies():
    """Ranks build them in one order; their executors start them in any."""

    @tf.function
    def step(x):
        return tf.add_n([total(x * float(i)) for i in range(MANY)])

    for _ in range(5):
        expected = everyones() * sum(range(MANY))
        assert step(mine()).numpy().tolist() == [expected] * 3


def test_gradients_of_many_collectives():
    """Within the function, and by a tape outside, whose graph TensorFlow does not order."""

    def loss(x):
        return tf.reduce_sum(tf.add_n([total(x * float(i)) for i in range(MANY)]))

    @tf.function
    def inside(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loss(x)
        return tape.gradient(y, x)

    outside = tf.function(loss)
    expected = [hvd.size() * sum(range(MANY))] * 3
    for _ in range(3):
        assert inside(mine()).numpy().tolist() == expected
        x = tf.Variable(mine())
        with tf.GradientTape() as tape:
            y = outside(x)
        assert tape.gradient(y, x).numpy().tolist() == expected


def test_branches_loops_and_functions_within_functions():
    @tf.function
    def inner(x):
        return total(x) + total(2.0 * x)

    @tf.function
    def step(x):
        y = inner(x) + total(x) + inner(x)
        if tf.reduce_sum(x) > -1.0:
            y += total(x)
        else:
            y += hvd.broadcast(x, 0)
        for _ in tf.range(4):
            total(x)  # whose result nobody uses
            y += total(x)
        hvd.barrier()
        return y + total(x)

    for _ in range(3):
        assert step(mine()).numpy().tolist() == [13 * everyones()] * 3


def test_results_that_nobody_uses():
    @tf.function
    def step(x):
        total(x)
        hvd.allgather(x)
        hvd.barrier()

    for _ in range(3):
        step(mine())
        gc.collect()
    assert total(mine()).numpy().tolist() == [everyones()] * 3


@pytest.mark.parametrize("name", [None, "given"])
def test_ranks_that_retrace_at_other_times(name):
    """One rank meets a new shape, another has seen it: names stay."""

    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum, name=name)

    @tf.function
    def step(x, extra):
        return inner(x) + hvd.allreduce(x, op=hvd.Sum) + 0.0 * tf.reduce_sum(extra)

    for i in range(6):
        extra = tf.zeros(1 + (i * (hvd.rank() + 1)) % 3)
        assert step(mine(), extra).numpy().tolist() == [2 * everyones()] * 3
    assert step.experimental_get_tracing_count() >= 1


@pytest.fixture
def first():
    """The next collective is as the first one of a process; other tests' functions stay usable."""
    made = graph._new_token()
    graph._new_token.cache_clear()
    yield
    del made


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("signature", [None, [tf.TensorSpec([None], tf.float32)]])
def test_the_first_collective_is_traced_once(signature):
    """Also in a function of a function; and a tape that gives one gradient is not used up."""
    traced = []
    v = tf.Variable(mine())

    @tf.function
    def inner(x):
        traced.append("inner")
        return total(v * x)

    @tf.function(input_signature=signature)
    def outer(x):
        traced.append("outer")
        return tape.gradient(inner(x), v), v * x

    for _ in range(2):
        with tf.GradientTape() as tape:
            gradient, _ = outer(mine())
        assert gradient.numpy().tolist() == [hvd.size() * (hvd.rank() + 1.0)] * 3
    assert traced == ["outer", "inner"]


@pytest.mark.usefixtures("first")
def test_the_first_collective_has_a_jacobian():
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = total(x * x)
        return tape.jacobian(y, x)

    expected = 2.0 * hvd.size() * (hvd.rank() + 1)
    assert step(mine(2)).numpy().tolist() == [[expected, 0.0], [0.0, expected]]


def test_functions_of_datasets_are_refused(within):
    elements = tf.data.Dataset.from_tensor_slices(tf.fill([2, 3], hvd.rank() + 1.0))
    with pytest.raises(ValueError, match=r"tf\.data can't call .* that the dataset yields"):
        elements.map(within(total))
    assert [total(x).numpy()[0] for x in elements] == [everyones()] * 2


def test_names():
    found = []

    @tf.function
    def train(x):
        found.append(next_name(Op.ALLREDUCE))
        y = total(x)
        if tf.reduce_sum(x) > 0.0:
            y = total(y)
        found.append(next_name(Op.BROADCAST))
        return y

    train(mine())
    train(mine(4))
    assert found == ["allreduce.train.0", "broadcast.train.2"] * 2


def test_shapes_that_are_unknown_while_tracing():
    spec = tf.TensorSpec([None, 2], tf.float32)

    @tf.function(input_signature=[spec])
    def step(x):
        gathered = hvd.allgather(x)
        assert gathered.shape.as_list() == [None, 2]
        return gathered, hvd.reducescatter(gathered, op=hvd.Sum)

    for rows in (1, 3):
        x = tf.fill([rows + hvd.rank(), 2], float(hvd.rank()))
        gathered, own = step(x)
        counts = [rows + r for r in range(hvd.size())]
        assert gathered.numpy()[:, 0].tolist() == np.repeat(range(hvd.size()), counts).tolist()
        assert sum(hvd.allgather_object(len(own))) == sum(counts)


def test_xla_is_refused_with_the_remedy():
    @tf.function(jit_compile=True)
    def step(x):
        return total(x)

    with pytest.raises(ValueError, match=r"XLA can't compile a collective .* leave jit_compile"):
        step(mine())


@pytest.mark.ranks(3)
def test_graphs_and_eager_calls_of_other_process_sets():
    pair = hvd.add_process_set([0, hvd.size() - 1])

    @tf.function
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum, process_set=pair)

    if pair.included():
        assert step(mine()).numpy().tolist() == [hvd.size() + 1] * 3
    assert total(mine()).numpy().tolist() == [everyones()] * 3
    hvd.remove_process_set(pair)
