# SPDX-License-Identifier: Apache-2.0
"""Tapes, optimizers and batch normalisation against one process with the joined batch."""

import doctest
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import farandole
import farandole.keras
import farandole.tensorflow as hvd

pytestmark = pytest.mark.ranks(1, 3)

ROWS = 6  # of each rank


def batches():
    """All ranks' (inputs, targets)."""
    made = [np.random.default_rng(r) for r in range(hvd.size())]
    return [
        (g.normal(size=(ROWS, 4)).astype("f4"), g.normal(size=(ROWS, 1)).astype("f4")) for g in made
    ]


def own_batch():
    return tuple(map(tf.constant, batches()[hvd.rank()]))


def joined_batch():
    return tuple(tf.constant(np.concatenate(parts)) for parts in zip(*batches(), strict=True))


def weights():
    rng = np.random.default_rng(99)
    shapes = [(4, 5), (5,), (5, 1)]
    return [tf.Variable(rng.normal(size=shape).astype("f4")) for shape in shapes]


def loss_of(ws, x, y):
    hidden = tf.nn.tanh(x @ ws[0] + ws[1])
    return tf.reduce_mean(tf.square(hidden @ ws[2] - y))


def close(ours, expected, tolerance=1e-5):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), tolerance, tolerance)


def equal_everywhere(values):
    flat = np.concatenate([np.asarray(v).ravel() for v in values])
    for theirs in hvd.allgather_object(flat):
        np.testing.assert_array_equal(theirs, flat)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_predivide_factor": 4.0},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
    ],
)
def test_tape(within, options):
    ws = weights()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(ws, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, ws)

    grads = within(step)(*own_batch())
    with tf.GradientTape() as tape:
        loss = loss_of(ws, *joined_batch()) * (hvd.size() if "op" in options else 1)
    close(grads, tape.gradient(loss, ws), 1e-2 if "compression" in options else 1e-5)
    equal_everywhere(grads)


def test_tape_around_a_tape_and_structures_with_none(within):
    ws, unused = weights(), tf.Variable(1.0)

    def step(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(ws, x, y)
        return tape.gradient(loss, {"used": ws, "not": unused})

    grads = within(step)(*own_batch())
    assert grads["not"] is None
    with tf.GradientTape() as tape:
        loss = loss_of(ws, *joined_batch())
    close(grads["used"], tape.gradient(loss, ws))


@pytest.mark.parametrize("dense", [False, True])
def test_embeddings(within, dense):
    """Ranks use other rows, some of them twice, beside a dense gradient."""
    n = hvd.size()
    table, weight = tf.Variable(tf.ones([2 * n + 1, 3])), tf.Variable([2.0])
    rows = [[r, r, 2 * n] + [n] * r for r in range(n)]

    def loss(rows):
        return weight[0] * tf.reduce_sum(tf.gather(table, rows))

    def step(mine):
        with tf.GradientTape() as tape:
            y = loss(mine)
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
        grads = tape.gradient(y, [table, weight])
        assert isinstance(grads[0], tf.Tensor if dense else tf.IndexedSlices)
        return tf.convert_to_tensor(grads[0]), grads[1]

    grads = within(step)(tf.constant(rows[hvd.rank()]))
    with tf.GradientTape() as tape:
        y = loss([row for own in rows for row in own]) / n
    expected = tape.gradient(y, [table, weight])
    close(grads, [tf.convert_to_tensor(expected[0]), expected[1]])


@pytest.mark.parametrize(
    ("make", "passes"),
    [(keras.optimizers.SGD, 1), (keras.optimizers.Adam, 1), (keras.optimizers.SGD, 2)],
)
def test_optimizer_over_three_epochs(within, make, passes):
    """Gradients of several passes are summed. It is the optimizer of tests/with_keras."""
    ours, alone = weights(), weights()
    hvd.broadcast_variables(ours, root_rank=0)
    optimizer = hvd.DistributedOptimizer(make(0.01, clipnorm=0.5), backward_passes_per_step=passes)
    plain = make(0.01, clipnorm=0.5)
    optimizer.build(ours)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(ours, x, y)
        optimizer.apply_gradients(zip(tape.gradient(loss, ours), ours, strict=True))

    step = within(step)
    x, y = own_batch()
    for _ in range(3):
        for rows in np.split(np.arange(ROWS), passes):
            step(x[rows[0] : rows[-1] + 1], y[rows[0] : rows[-1] + 1])
        with tf.GradientTape() as tape:
            loss = loss_of(alone, *joined_batch()) * passes
        plain.apply_gradients(zip(tape.gradient(loss, alone), alone, strict=True))
    close(ours, alone)
    equal_everywhere(ours)


def test_elastic_training():
    """An error of TensorFlow that tells a PeerError takes all ranks back to the last commit."""
    weight, n, found = tf.Variable([float(hvd.rank()), 2.0]), hvd.size(), []
    state = hvd.elastic.TensorFlowState([weight], step=0)

    def lose():
        raise hvd.PeerError("a rank died")

    @hvd.elastic.run
    def train(state):
        found.append((state.step, weight.numpy().tolist()))
        while state.step < 3:
            weight.assign_add(tf.function(hvd.allreduce)(tf.ones(2), op=hvd.Sum))
            state.step += 1
            if state.step == 1:
                state.commit()
            elif len(found) == 1:
                tf.function(lambda: tf.numpy_function(lose, [], tf.float32))()

    train(state)
    assert found == [(0, [0, 2]), (1, [n, 2 + n])]
    assert weight.numpy().tolist() == [3 * n, 2 + 3 * n]


def test_wrong_options():
    tape = tf.GradientTape()
    for options in ({"op": "sum"}, {"compression": 3}, {"gradient_predivide_factor": 0.0}):
        with pytest.raises((TypeError, ValueError)):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.raises(TypeError, match=r"pass a tf\.GradientTape"):
        hvd.DistributedGradientTape(3)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)


@pytest.mark.parametrize(("dtype", "mean", "spread"), [("f4", 1, 3), ("f8", 1e6, 1e-2)])
def test_sync_batch_normalisation(within, dtype, mean, spread):
    """Batches of other lengths: values, statistics and gradients."""
    lengths = [2 + r for r in range(hvd.size())]
    data = np.random.default_rng(5).normal(mean, spread, (sum(lengths), 3)).astype(dtype)
    factor = np.random.default_rng(6).normal(size=data.shape).astype(dtype)
    begin = sum(lengths[: hvd.rank()])
    own = slice(begin, begin + lengths[hvd.rank()])
    options = {"dtype": {"f4": "float32", "f8": "float64"}[dtype], "epsilon": spread**2 / 100}
    ours, plain = hvd.SyncBatchNormalization(**options), keras.layers.BatchNormalization(**options)
    ours.build((None, 3))
    plain.build((None, 3))

    def run(layer, x, f):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.sin(y) * f)
        return y, tape.gradient(loss, [x, *layer.trainable_variables])

    x, f = tf.constant(data), tf.constant(factor)
    y, grads = within(lambda x, f: run(ours, x, f))(x[own], f[own])
    expected, expected_grads = run(plain, x, f)
    close([y, grads[0]], [expected[own], expected_grads[0][own]], 1e-4)
    close([hvd.allreduce(g, op=hvd.Sum) for g in grads[1:]], expected_grads[1:], 1e-4)
    close(
        [ours.moving_mean, ours.moving_variance], [plain.moving_mean, plain.moving_variance], 1e-4
    )
    close([ours(x[own], training=False)], [plain(x[own], training=False)], 1e-4)


def test_a_copied_layer_keeps_its_process_set():
    sets = [hvd.add_process_set([r]) for r in range(hvd.size() if hvd.size() > 1 else 0)]
    own = sets[hvd.rank()] if sets else hvd.global_process_set
    layer = hvd.SyncBatchNormalization(process_set=own, name="norm")
    config = layer.get_config()
    copy = hvd.SyncBatchNormalization.from_config(config)
    x = tf.fill((2, 3), float(hvd.rank()))
    close([copy(x, training=True)], [tf.zeros_like(x)], 1e-6)
    for one in sets:
        hvd.remove_process_set(one)
    if sets:
        with pytest.raises(ValueError, match="norm: its process set has ranks"):
            hvd.SyncBatchNormalization.from_config(config)


@pytest.mark.filterwarnings("ignore")  # Keras's own
@pytest.mark.ranks(1)
def test_every_call_has_an_example_that_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for package in (hvd, farandole.keras):
        assert dir(package) == sorted(package.__all__)
        for name in [*package.__all__, *NESTED]:
            found = package
            for part in name.split("."):
                found = getattr(found, part, None)
            if not callable(found) or found is getattr(farandole, name, None):
                continue
            doc = inspect.getdoc(found) or ""
            if inspect.isfunction(found):
                assert "\nExamples:\n" in doc, name
                missing = [one for one in inspect.signature(found).parameters if one not in doc]
                assert not missing, (name, missing)
            names = {"hvd": package, "farandole": farandole, "keras": keras, "tf": tf, "np": np}
            runner.run(parser.get_doctest(doc, names, name, None, 0))
    failed, attempted = runner.summarize()
    assert failed == 0
    assert attempted > 25


NESTED = [
    "callbacks.BestModelCheckpoint",
    "callbacks.BroadcastGlobalVariablesCallback",
    "callbacks.LearningRateScheduleCallback",
    "callbacks.LearningRateWarmupCallback",
    "callbacks.MetricAverageCallback",
    "elastic.CommitStateCallback",
    "elastic.KerasState",
    "elastic.TensorFlowState",
    "elastic.UpdateBatchStateCallback",
    "elastic.UpdateEpochStateCallback",
    "elastic.run",
]
