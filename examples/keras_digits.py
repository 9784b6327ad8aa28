# SPDX-License-Identifier: Apache-2.0
"""A Keras model for handwritten digits, trained by fit() on all ranks, on any backend of Keras 3.

    pip install keras scikit-learn
    KERAS_BACKEND=torch mpirun -np 2 python examples/keras_digits.py        # or tensorflow

Expected on 1, 2 or 4 ranks, in about a minute:

    test accuracy 0.9...
    parameters identical on all ranks: yes
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import farandole.keras as hvd

BATCH, TRAINED = 64, 1536  # images per step, over all ranks; training images (the rest test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    hvd.init()

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # the same on all ranks
    images, labels = digits.data.astype("float32")[order] / 16, digits.target[order]
    mine = np.arange(hvd.rank(), TRAINED, hvd.size())
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.layers.Input((64,)), *layers])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2),
    ]
    size = BATCH // hvd.size()
    model.fit(images[mine], labels[mine], size, options.epochs, verbose=0, callbacks=callbacks)

    _, accuracy = model.evaluate(images[TRAINED:], labels[TRAINED:], verbose=0)
    own = np.concatenate([keras.ops.convert_to_numpy(w).ravel() for w in model.weights])
    identical = all(np.array_equal(own, theirs) for theirs in hvd.allgather_object(own))
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.3f}")
        print(f"parameters identical on all ranks: {'yes' if identical else 'NO'}")


if __name__ == "__main__":
    main()
