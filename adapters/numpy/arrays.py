# SPDX-License-Identifier: Apache-2.0
"""Collections of NumPy arrays: what a model's parameters or gradients come as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Arrays", "items"]

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array] | Sequence[Array]


def items(arrays: Arrays) -> list[tuple[str, Array]]:
    """(name, array) in an order that is the same on all ranks: dicts by key, lists by position."""
    if isinstance(arrays, Mapping):
        return sorted(arrays.items())
    return [(str(i), array) for i, array in enumerate(arrays)]
