# SPDX-License-Identifier: Apache-2.0
"""A framework of nobody's: arrays that can't be written to, and what its adapter package brings.

`installed(folder)` puts both where pip would: two modules, and metadata with the entry point.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["installed"]

FRAMEWORK = '''
import numpy as np


class Frozen:
    """Values that never change, as JAX's."""

    def __init__(self, values):
        self._values = np.array(values)
        self._values.flags.writeable = False

    def read(self):
        return self._values
'''

ADAPTER = '''
import numpy as np
from frozen import Frozen

from farandole.arrays.buffers import Buffer, address_or_empty, code_of
from farandole.arrays.kinds import Kind, register


class FrozenKind(Kind):
    """Frozen arrays, on the CPU."""

    def matches(self, x):
        return isinstance(x, Frozen)

    def describe(self, x, in_place=False):
        if in_place and isinstance(x, Frozen):
            raise ValueError("a Frozen array can't be changed in place; use the out-of-place call")
        values = x.read() if isinstance(x, Frozen) else x  # what empty() made
        values = values if values.flags.c_contiguous else values.copy(order="C")
        pointer = address_or_empty(values.ctypes.data, values.shape, "a Frozen array")
        return Buffer(pointer, code_of(values.dtype), values.shape, values)

    def empty(self, like, shape=None):
        values = like.read()
        return np.empty(values.shape if shape is None else shape, values.dtype)

    def sealed(self, result, like):
        return Frozen(result)

    def wrap(self, memory, like):
        return Frozen(np.asarray(memory).view(like.read().dtype))


register(FrozenKind())
'''

METADATA = "Metadata-Version: 2.1\nName: farandole-frozen\nVersion: 1.0\n"


def installed(folder: Path) -> Path:
    """Writes the two packages into a folder for sys.path, and gives it."""
    info = folder / "farandole_frozen-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[farandole.adapters]\nfrozen = farandole_frozen\n")
    (folder / "frozen.py").write_text(FRAMEWORK)
    (folder / "farandole_frozen.py").write_text(ADAPTER)
    return folder
