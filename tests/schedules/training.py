# SPDX-License-Identifier: Apache-2.0
"""What the jobs train. All numbers are integers below 2**53, so that neither the number of ranks
nor the order of additions changes them; a sample that is missed or counted twice does."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "EPOCHS", "SAMPLES", "STEPS", "batches", "digest", "gradient", "moved", "seen"]

Weights = NDArray[np.float64]

SAMPLES, BATCH, EPOCHS = 48, 12, 3
STEPS = EPOCHS * SAMPLES // BATCH
_PRIME, _MODULUS = 1021, 65521


def begin(elements: int) -> Weights:
    """The weights before the first step."""
    return np.arange(elements, dtype=np.float64) % _MODULUS


@functools.cache
def batches() -> list[list[int]]:
    """The samples of each step, of all ranks together."""
    orders = [np.random.default_rng(epoch).permutation(SAMPLES) for epoch in range(EPOCHS)]
    return [batch.tolist() for order in orders for batch in order.reshape(-1, BATCH)]


def gradient(weights: Weights, samples: Iterable[int]) -> Weights:
    """What these samples add."""
    total = np.zeros_like(weights)
    for sample in samples:
        total += weights * (sample + 1) % _PRIME
    return total


def moved(weights: Weights, total: Weights) -> Weights:
    """The weights after a step in which all gradients together are `total`."""
    return (weights * 31 + total) % _MODULUS


def digest(weights: Weights) -> str:
    """All bits of the weights, in few letters."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


@functools.cache
def undisturbed(elements: int) -> str:
    """The digest at the end if nothing happens."""
    weights = begin(elements)
    for batch in batches():
        weights = moved(weights, gradient(weights, batch))
    return digest(weights)


def seen() -> list[int]:
    """Each sample in the order in which it counts; within a step, sorted."""
    return [sample for batch in batches() for sample in sorted(batch)]
