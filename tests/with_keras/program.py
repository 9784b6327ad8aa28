# SPDX-License-Identifier: Apache-2.0
"""What test_keras.py runs on each of four ranks, for one backend of Keras. Under mpirun: in worlds
of 3 and 1, of 2 and of 4, one after the other, as imports take longest. As an elastic job: a rank
dies.
"""

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import farandole.keras as hvd

TRAINED, BATCH = 1536, 48  # images; of all ranks together in a step


def network(seed, dropout=()):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(32, "relu"), *dropout, keras.layers.Dense(10)]
    return keras.Sequential([keras.layers.Input((64,)), *layers])


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def weights(model):
    return [np.asarray(keras.ops.convert_to_numpy(w)) for w in model.trainable_variables]


def check_equal_everywhere(model):
    own = np.concatenate([w.ravel() for w in weights(model)])
    for theirs in hvd.allgather_object(own):
        np.testing.assert_array_equal(theirs, own)


def own_part(images, labels, batch=BATCH):
    """This rank's rows of each batch, whose order is that of one process."""
    rows = np.arange(len(labels)).reshape(-1, batch)[:, hvd.rank() :: hvd.size()].ravel()
    return images[rows], labels[rows]


def test_one_step_is_that_of_one_process(images, labels):
    for passes in (1, 2):
        ours, alone = network(1), network(1)
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
        compiled(ours, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, clipnorm=0.2), **options))
        compiled(alone, keras.optimizers.SGD(0.5, clipnorm=0.2))
        before = weights(ours)
        x, y = own_part(images[:BATCH], labels[:BATCH])
        for part in np.split(np.arange(len(y)), passes):
            ours.train_on_batch(x[part], y[part])
        alone.train_on_batch(images[:BATCH], labels[:BATCH])
        for a, b, c in zip(weights(ours), weights(alone), before, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
            assert np.abs(a - c).max() > 1e-3
        check_equal_everywhere(ours)


def test_fit(images, labels, folder):
    model = network(hvd.rank())  # other weights on each rank
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    assert type(optimizer).__name__ == "Adam"
    compiled(model, optimizer)
    path = folder / f"best-{hvd.size()}-{hvd.rank()}.keras"
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(4e-3, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(4e-3, lambda e: 0.5 ** (e - 2), start_epoch=2),
        hvd.callbacks.BestModelCheckpoint(path, monitor="val_loss"),
    ]
    x, y = own_part(images[:TRAINED], labels[:TRAINED])
    tests = own_part(images[TRAINED : TRAINED + 240], labels[TRAINED : TRAINED + 240])
    history = model.fit(
        x, y, BATCH // hvd.size(), 4, verbose=0, callbacks=callbacks, validation_data=tests
    ).history
    check_equal_everywhere(model)
    assert all(theirs == history for theirs in hvd.allgather_object(history))
    assert history["val_accuracy"][-1] > 0.8, history
    np.testing.assert_allclose(history["lr"], [*history["lr"][:1], 4e-3, 4e-3, 2e-3], rtol=1e-5)
    assert history["lr"][0] < 4.001e-3
    assert path.exists() == (hvd.rank() == 0)
    assert callbacks[-1].best == min(history["val_loss"])  # any rank may become rank 0
    # Half as many batches, as in another world: the warm-up counts them anew.
    half = model.fit(x[::2], y[::2], BATCH // hvd.size(), 1, verbose=0, callbacks=callbacks[2:3])
    np.testing.assert_allclose(half.history["lr"], history["lr"][:1], rtol=1e-5)
    return model


def test_load_model(model, images, labels, folder):
    path = folder / f"saved-{hvd.size()}-{hvd.rank()}.keras"
    model.save(path)
    plain = keras.saving.load_model(path)  # without farandole
    assert type(plain.optimizer).__name__ == "Adam"
    loaded = hvd.load_model(path)
    x, y = own_part(images[:BATCH], labels[:BATCH])
    for one in (model, loaded):
        one.fit(x, y, BATCH, 1, verbose=0)
        check_equal_everywhere(one)
    for a, b in zip(weights(model), weights(loaded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    loaded.fit(x, y, BATCH, 1, verbose=0, callbacks=[callback])
    check_equal_everywhere(loaded)


class Wrapper(keras.optimizers.Optimizer):
    """A user's optimizer around another one."""

    def __init__(self, inner):
        super().__init__(learning_rate=1.0)
        self.inner = inner

    def build(self, variables):
        self.inner.build(variables)
        super().build(variables)

    @property
    def variables(self):
        return self._variables + self.inner.variables

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)


class Stepper(Wrapper):
    """As above, which does not call the other one's apply()."""

    def apply(self, grads, trainable_variables=None):
        keras.optimizers.Optimizer.apply(self, grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        self.inner.update_step(gradient, variable, learning_rate)


class Own(keras.optimizers.SGD):
    """A user's class."""


def test_nestings(images, labels):
    """An optimizer in another one steps as one process does with all rows, or is refused."""
    wrap, sgd = hvd.DistributedOptimizer, keras.optimizers.SGD
    scaled, several = keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer

    def parts(inner):
        return several(keras.optimizers.OptimizerMap(inner))

    alike = {  # what is distributed, in it, around it
        "scaled": (scaled, {"use_ema": True}, lambda x: x),
        "scaled, accumulated": (scaled, {"gradient_accumulation_steps": 2}, lambda x: x),
        "parts": (parts, {}, lambda x: x),
        "inside parts": (lambda x: x, {}, parts),
        "inside a wrapper": (lambda x: x, {}, Wrapper),
        "a wrapper of steps": (Stepper, {}, lambda x: x),
    }
    x, y = own_part(images[: 2 * BATCH], labels[: 2 * BATCH])
    for name, (inner, options, outer) in alike.items():
        found = []
        for wrapped in (wrap, lambda x: x):
            model, ours = network(1), wrapped is wrap
            optimizer = outer(wrapped(inner(sgd(0.1, momentum=0.5, **options))))
            model.compile(optimizer, "sparse_categorical_crossentropy", auto_scale_loss=False)
            rows = (
                (x, y, BATCH // hvd.size())
                if ours
                else (images[: 2 * BATCH], labels[: 2 * BATCH], BATCH)
            )
            model.fit(*rows, 1, verbose=0, shuffle=False)
            found.append(weights(model))
            if ours:
                check_equal_everywhere(model)
        for a, b, c in zip(*found, weights(network(1)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
            assert np.abs(a - c).max() > 1e-6, name

    def late(x):
        made = scaled(x)
        wrap(x)
        return made

    refused = {
        "each rank decide alone": [
            lambda: scaled(wrap(sgd())),
            lambda: scaled(parts(wrap(sgd()))),
            lambda: Wrapper(scaled(Wrapper(wrap(sgd())))),
            lambda: late(sgd()),
        ],
        r"did not start with apply\(\)": [lambda: Stepper(wrap(sgd()))],
        "wrap it once": [lambda: wrap(scaled(wrap(sgd())))],
        "pass gradient_accumulation_steps to that one": [
            lambda: wrap(scaled(sgd()), backward_passes_per_step=2),
            lambda: wrap(parts(sgd()), backward_passes_per_step=2),
        ],
    }
    for text, makes in refused.items():
        for make in makes:
            with pytest.raises((ValueError, RuntimeError), match=text):
                compiled(network(1), make()).fit(x, y, BATCH, 1, verbose=0)


def test_an_overflow_on_one_rank(images, labels):
    """All ranks skip the step, and halve the scale."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    model = compiled(network(1), hvd.DistributedOptimizer(optimizer))
    x, y = own_part(images[:BATCH], labels[:BATCH])
    for factor in (np.inf if hvd.rank() == 1 else 1.0, 1.0):
        model.fit(x * np.float32(factor), y, BATCH, 1, verbose=0)
        check_equal_everywhere(model)
        assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 4.0
        steps = 0 if np.isinf(hvd.broadcast(np.array(factor), 1)) else 1
        assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == steps


def test_copies(images, labels, folder):
    """What is like a DistributedOptimizer but is none does not train alone."""
    x, y = own_part(images[:BATCH], labels[:BATCH])
    model = compiled(network(1), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(x, y, BATCH, 1, verbose=0)
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    path = folder / f"copied-{hvd.size()}-{hvd.rank()}.keras"
    model.save(path)

    def again(optimizer):
        return type(optimizer).from_config(optimizer.get_config())

    def from_config():
        made = network(1)
        made.compile_from_config(model.get_compile_config())
        return made

    def serialised(optimizer):
        config = keras.saving.serialize_keras_object(optimizer)
        return keras.saving.deserialize_keras_object(config)

    copies = [
        from_config,
        lambda: keras.models.clone_model(model),
        lambda: keras.saving.load_model(path),
        lambda: copy.deepcopy(model),
        lambda: pickle.loads(pickle.dumps(model)),
        lambda: compiled(network(1), serialised(model.optimizer)),
    ]
    own = hvd.DistributedOptimizer(Own(0.1))
    ways = (again, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))
    for optimizer, way in product((model.optimizer, scaled, own), ways):
        copies.append(lambda optimizer=optimizer, way=way: compiled(network(1), way(optimizer)))
    for number, make in enumerate(copies):
        copied = make()
        if hvd.size() > 1:
            with pytest.raises(RuntimeError, match="a DistributedOptimizer that was copied"):
                copied.fit(x, y, BATCH, 1, verbose=0)
            copied = make()  # on JAX the weights are lost with an error in fit()
            compiled(copied, hvd.DistributedOptimizer(copied.optimizer))
        if number % 4 == 0:
            copied.fit(x, y, BATCH, 1, verbose=0)  # alone a copy is the plain optimizer
            check_equal_everywhere(copied)
    hvd.load_model(path).fit(x, y, BATCH, 1, verbose=0)
    uncompiled = folder / f"uncompiled-{hvd.size()}-{hvd.rank()}.keras"
    network(1).save(uncompiled)
    assert not hvd.load_model(uncompiled).compiled
    command = "import sys, keras; print(type(keras.saving.load_model(sys.argv[1]).optimizer))"
    result = subprocess.run(
        [sys.executable, "-c", command, str(path)], check=True, capture_output=True, text=True
    )
    assert result.stdout.startswith("<class 'keras.src.optimizers.sgd.SGD'>") or (
        keras.backend.backend() == "torch" and "torch_sgd.SGD'" in result.stdout
    )


def test_who_trains_alone_is_told(images, labels):
    x, y = own_part(images[:BATCH], labels[:BATCH])
    plain = keras.optimizers.SGD
    parts = {"dense.*": hvd.DistributedOptimizer(plain(0.1))}
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback

    def told(model, callbacks, number):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, y, BATCH // 4, 2, verbose=0, callbacks=callbacks)
        texts = [
            str(one.message) for one in caught if "gradients alone: SGD did" in str(one.message)
        ]
        assert len(texts) == number, texts

    told(compiled(network(1), plain()), [callback(0)], 1)
    mixed = keras.optimizers.OptimizerMap(plain(0.1), {".*kernel": parts["dense.*"]})
    told(compiled(network(1), keras.optimizers.MultiOptimizer(mixed)), [callback(0)], 1)
    model = compiled(network(1), plain())
    model.fit(x, y, BATCH // 4, 1, verbose=0)
    hvd.DistributedOptimizer(model.optimizer)  # too late, if the backend has compiled the step
    told(model, [callback(0)], 0 if keras.backend.backend() == "torch" else 1)
    told(compiled(model, model.optimizer), [callback(0)], 0)
    check_equal_everywhere(model)

    class Steps(keras.Model):
        def train_step(self, *args):
            return super().train_step(*args)

    inputs = keras.Input((64,))
    own = compiled(Steps(inputs, network(1)(inputs)), plain())
    told(own, [callback(0)], 0)  # may reduce by itself


def test_metrics_of_all_ranks():
    rank, size = hvd.rank(), hvd.size()
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + rank, "f1_score": np.array([rank, 1.0, 2.0 * rank], "float32")}
    callback.on_epoch_end(0, logs)
    middle = (size - 1) / 2
    assert logs["loss"] == 1.0 + middle
    np.testing.assert_allclose(logs["f1_score"], [middle, 1.0, 2 * middle])
    for wrong, text in {
        "val_loss": f"metric val_loss is of shape \\(\\) on rank.*, missing on rank {size - 1}",
        "f1_score": r"metric f1_score is of shape \(3,\) on rank.*\(2,\) on rank",
    }.items():
        logs = {"loss": 1.0, "f1_score": np.ones(3), "val_loss": 2.0}
        if rank == size - 1:
            del logs[wrong]
            logs["val_other" if wrong == "val_loss" else wrong] = np.ones(2)
        kept = dict(logs)
        with pytest.raises(hvd.MismatchError, match=text):
            callback.on_epoch_end(0, logs)
        assert kept.keys() == logs.keys()
    logs = {"loss": "text" if rank == size - 1 else 1.0}
    with pytest.raises((ValueError, hvd.FarandoleError), match="text"):
        callback.on_epoch_end(0, logs)
    callback.on_epoch_end(0, None)


def test_nonsense():
    def refused(kind, text, call):
        with pytest.raises(kind, match=text):
            call()

    wrap, sgd = hvd.DistributedOptimizer, keras.optimizers.SGD
    refused(TypeError, r"pass a keras\.optimizers\.Optimizer", lambda: wrap("sgd"))
    refused(ValueError, "wrap it once", lambda: wrap(wrap(sgd())))
    refused(TypeError, "op is 'sum'", lambda: wrap(sgd(), op="sum"))
    refused(TypeError, "compression is 3", lambda: wrap(sgd(), compression=3))
    refused(ValueError, "backward_passes_per_step", lambda: wrap(sgd(), backward_passes_per_step=0))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        refused(ValueError, "each rank would skip steps alone", lambda: wrap(sgd()))
        wrap(keras.optimizers.LossScaleOptimizer(sgd()))
    finally:
        keras.config.set_dtype_policy("float32")
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    refused(ValueError, "model.build", lambda: hvd.broadcast_state(unbuilt))
    if hvd.size() > 1:
        one = unbuilt if hvd.rank() == 0 else network(1)  # an error on all
        refused((ValueError, hvd.PeerError), r"model\.build", lambda: hvd.broadcast_state(one))
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1 + hvd.rank())])
        refused(hvd.MismatchError, "keras.state", lambda: hvd.broadcast_state(model))


def test_objects_of_a_state(folder):
    """Models, wherever a state holds them, stay the same ones: the values of their variables are
    saved, restored, sent and written."""
    model, average = network(hvd.rank(), []), network(5 + hvd.rank(), [])
    state = hvd.elastic.KerasState(model, held=[average], epoch=hvd.rank())
    state.sync()
    check_equal_everywhere(average)
    before = [value.copy() for value in weights(average)]

    def change():
        for variable in average.weights:
            variable.assign(variable + 1 + hvd.rank())
        state.epoch += 1

    def check_restored():
        assert (state.held[0] is average, state.epoch) == (True, 0)
        for now, then in zip(weights(average), before, strict=True):
            np.testing.assert_array_equal(now, then)

    change()
    state.restore()
    check_restored()
    place = folder / f"objects-{hvd.size()}" / "call-1"
    state.write(place)
    change()
    state.save()
    assert state.read(place)
    state.sync()
    check_restored()


class DiesInEpochOne(keras.callbacks.Callback):
    """Once, on rank 1, while the others reduce gradients."""

    def __init__(self, folder):
        super().__init__()
        self.told = folder / "died"

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch, hvd.rank()) == (1, 5, 1) and not self.told.exists():
            self.told.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_elastic(images, labels, folder):
    """A rank dies within fit(): the others hear of it within 2 seconds, and go on without it."""
    model = network(hvd.rank(), [keras.layers.Dropout(0.1)])
    compiled(model, hvd.DistributedOptimizer(keras.optimizers.Adam(4e-3)))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, batches=[])
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
        DiesInEpochOne(folder),
    ]
    found, heard, world = [], [], state.world
    joins = state.world == 1 and hvd.size() == 1  # in place of the dead one

    @hvd.elastic.run
    def train(state):
        found.append((hvd.size(), state.epoch, state.batch, weights(model)))
        x, y = own_part(images[:TRAINED], labels[:TRAINED])
        epochs = {"initial_epoch": state.epoch, "epochs": 4}
        try:
            model.fit(x, y, BATCH // hvd.size(), **epochs, verbose=0, callbacks=callbacks)
        except Exception as error:
            heard.append(f"{type(error)} {error}")
            raise

    train(state)
    check_equal_everywhere(model)
    committed = hvd.broadcast_object(found[1][3] if not joins else None, 0)
    assert (state.epoch, state.batch) == (4, 0)
    assert state.world > world
    if not joins:
        assert "PeerError" in heard[0]
        assert "rank 1" in heard[0]
        assert [each[:3] for each in found[:2]] == [(4, 0, 0), (3, 1, 4)], found
        for own, theirs in zip(found[1][3], committed, strict=True):
            np.testing.assert_array_equal(own, theirs)  # of the last commit
    tests = images[TRAINED:], labels[TRAINED:]
    _, accuracy = model.evaluate(*tests, verbose=0)
    assert accuracy > 0.8, accuracy


def main():
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16, digits.target
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["elastic"]:
        hvd.init()
        test_elastic(images, labels, folder)
        print(f"rank {hvd.rank()} has gone on", flush=True)
        return
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    worlds = [MPI.COMM_WORLD.Split(rank < first) for first in (3, 2, 4)]
    for comm in worlds:
        if comm.Get_size() == 2 and rank > 1:
            continue  # one pair is enough
        hvd.init(comm)
        test_one_step_is_that_of_one_process(images, labels)
        model = test_fit(images, labels, folder)
        test_objects_of_a_state(folder)
        if hvd.size() in (1, 2):
            test_load_model(model, images, labels, folder)
            test_nonsense()
            test_copies(images, labels, folder)
        if hvd.size() == 2:
            test_nestings(images, labels)
            test_an_overflow_on_one_rank(images, labels)
            test_who_trains_alone_is_told(images, labels)
            test_metrics_of_all_ranks()
        print(f"rank {hvd.rank()} of {hvd.size()}: all is well", flush=True)
        hvd.shutdown()


if __name__ == "__main__":
    main()
