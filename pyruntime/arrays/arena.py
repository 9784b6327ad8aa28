# SPDX-License-Identifier: Apache-2.0
"""Memory that all ranks of a host map: collectives on it copy nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from farandole._library import check, ffi, lib

__all__ = ["allocate", "empty"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Allocation:
    """Bytes in this process's arena, given back with their last view."""

    def __init__(self, nbytes: int) -> None:
        memory = ffi.new("void**")
        check(lib.farandole_allocate(nbytes, memory))
        self._memory = memory[0]
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (int(ffi.cast("uintptr_t", self._memory)), False),
        }

    def __del__(self, free: Any = lib.farandole_deallocate) -> None:
        if hasattr(self, "_memory"):
            free(self._memory)


def allocate(nbytes: int) -> Array:
    """Zeroed bytes, shape (nbytes,), dtype uint8, in memory that all ranks of this host can map.

    Raises LibraryError where memory is short.
    """
    return np.asarray(_Allocation(nbytes))


def empty(shape: int | Sequence[int], dtype: Any = float) -> Array:
    """As numpy.empty, in memory that the other ranks of this host map: no collective copies it.

    The array and its views behave as any other; whole pages are allocated, so prefer few large
    ones. Each rank calls it by itself, before or after init(), for as many arrays as it likes;
    copies and pickles are ordinary arrays. In a forked child (a DataLoader worker) the array shows
    what the parent has there until the child writes to it; the parent does not see those writes.
    Raises LibraryError where memory is short, TypeError for a dtype of Python objects.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} holds Python objects: other processes cannot read them")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    if nbytes < 0 or any(n < 0 for n in shape):
        raise ValueError(f"negative dimensions in {shape}")
    if nbytes == 0:
        return np.empty(shape, dtype)
    array: Array = allocate(nbytes).view(dtype).reshape(shape)
    return array
