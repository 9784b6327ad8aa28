# SPDX-License-Identifier: Apache-2.0
"""Adasum by its definition, in float64 on all ranks' tensors, for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import farandole as fd
from harness.arrays import Array

__all__ = ["EPS", "assert_near", "expected", "reference", "tensor"]

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def tensor(rank: int, shape: tuple[int, ...], dtype: str = "float64", salt: int = 0) -> Array:
    """Neither parallel nor orthogonal, of different lengths."""
    rng = np.random.default_rng([rank, salt])
    common = np.random.default_rng(salt).standard_normal(shape)
    return np.asarray((common + rng.standard_normal(shape)) * (1 + rank), dtype)


def _pair(a: Array, b: Array) -> Array:
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return np.asarray(
        (1 - (dot / (2 * aa) if aa else 0)) * a + (1 - (dot / (2 * bb) if bb else 0)) * b
    )


def reference(inputs: list[Array]) -> Array:
    """The tree: the largest power of two below the number of ranks goes left."""
    if len(inputs) == 1:
        return np.asarray(inputs[0], np.float64)
    left = 1
    while left * 2 < len(inputs):
        left *= 2
    return _pair(reference(inputs[:left]), reference(inputs[left:]))


def expected(shape: tuple[int, ...], dtype: str = "float64", salt: int = 0) -> Array:
    """What all ranks' tensors make."""
    return reference([tensor(r, shape, dtype, salt).astype(np.float64) for r in range(fd.size())])


def assert_near(actual: Any, wanted: Array, dtype: str = "float64") -> None:
    """A few roundings of the largest addend."""
    scale = max(1e-30, float(np.abs(wanted).max(initial=0.0)) + 8.0 * fd.size())
    error = np.abs(np.asarray(actual, np.float64) - wanted).max(initial=0.0)
    assert error <= 4 * fd.size() * EPS[dtype] * scale
