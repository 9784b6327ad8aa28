# SPDX-License-Identifier: Apache-2.0
"""Keras' fit() over farandole.keras with every optimizer of Keras, beside one process on the joined
batch. In ranks, by run.py; KERAS_BACKEND says on what."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import farandole.keras as hvd

ROWS, STEPS = 12, 4  # rows of all ranks in a step
NAMES = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl")


def network() -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def data(own: bool) -> tuple[np.ndarray, np.ndarray]:
    """All rows, or this rank's of each batch, in one process's order."""
    x = np.random.default_rng(5).normal(size=(ROWS * STEPS, 6)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True))
    rows = np.arange(len(x)).reshape(STEPS, ROWS)
    chosen = (rows[:, hvd.rank() :: hvd.size()] if own else rows).ravel()
    return x[chosen], y[chosen]


@pytest.mark.parametrize("name", NAMES)
def test_as_one_process(name: str) -> None:
    make = getattr(keras.optimizers, name)
    ours, alone = network(), network()
    ours.compile(hvd.DistributedOptimizer(make(0.01)), "mse")
    alone.compile(make(0.01), "mse")
    ours.fit(*data(True), ROWS // hvd.size(), 2, verbose=0, shuffle=False)
    alone.fit(*data(False), ROWS, 2, verbose=0, shuffle=False)
    for a, b in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
        assert len({bits.tobytes() for bits in hvd.allgather_object(a)}) == 1
