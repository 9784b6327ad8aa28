# SPDX-License-Identifier: Apache-2.0
"""Memory of the program's own: whoever writes there besides it wrote to what had been freed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from strangers.program import Array, Tensor, itemsize, shape_of

__all__ = ["Canaries"]

_PATTERN = 0x5C


class Canaries:
    """Arrays with a known content, as large as a program's tensors."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Any]] = []

    def add(self, t: Tensor, rank: int, count: int, keep: bool, what: str) -> None:
        """Makes `count` arrays of each size that the tensor has, for NumPy's heap and torch's."""
        made: list[Any] = []
        for index in range(t.count):
            nbytes = itemsize(t.dtype) * int(np.prod(shape_of(t, index, rank)))
            for _ in range(count):
                made.append(np.full(nbytes, _PATTERN, np.uint8))
                made.append(torch.full((nbytes,), _PATTERN, dtype=torch.uint8))
        if keep:
            self._kept += [(what, array) for array in made]

    def changed(self) -> list[str]:
        """What has been written to, each named once."""
        found, left = [], []
        for what, array in self._kept:
            view: Array = np.asarray(array)
            if (view == _PATTERN).all():
                left.append((what, array))
                continue
            where = np.flatnonzero(view != _PATTERN)
            kind = type(array).__module__.partition(".")[0]
            digest = hashlib.sha256(view.tobytes()).hexdigest()[:8]
            found.append(
                f"memory of the program's own ({kind}, {view.size} bytes, {what}) was overwritten: "
                f"{len(where)} bytes from {where[0]} to {where[-1]}, first "
                f"{view[where[:16]].tolist()} (content {digest})"
            )
        self._kept = left
        return found
