# SPDX-License-Identifier: Apache-2.0
"""Allocates arrays that all ranks of a host can map, so collectives on them copy nothing.

empty() of every adapter and gradient_as_bucket_view use this module. Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np

from farandole._library import check, ffi, lib

Array = np.ndarray[Any, np.dtype[Any]]


class _ArenaMemory:
    """Bytes in this process's arena. Freed when no view of the bytes is left."""

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
    """Zeroed uint8 array of shape (nbytes,) in memory that all ranks of this host can map.

    Raises LibraryError if memory is short.
    """
    return np.asarray(_ArenaMemory(nbytes))


def empty(shape: int | Sequence[int], dtype: Any = float) -> Array:
    """An uninitialised array in memory that the host's ranks share: no collective copies it.

    The array and its views behave like any other array; copies and pickles are ordinary arrays.
    farandole allocates whole pages, so prefer few large arrays. Not collective: each rank may
    create any number, before or after init(). A forked child (a DataLoader worker) sees the
    parent's values until the child writes; the parent never sees the child's writes.

    - shape: an int or a sequence of ints.
    - dtype: any dtype except Python objects.

    Raises LibraryError if memory is short, TypeError for a dtype of Python objects, ValueError for
    negative dimensions.

    Examples:
        >>> x = hvd.empty((2, 3), "float32")
        >>> x[:] = 1.0
        >>> hvd.allreduce_(x).sum()
        np.float32(6.0)
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} holds Python objects: other processes cannot read them")
    shape = (shape,) if isinstance(shape, int) else tuple(map(index, shape))
    nbytes = dtype.itemsize * prod(shape)
    if nbytes < 0 or any(n < 0 for n in shape):
        raise ValueError(f"negative dimensions in {shape}")
    if nbytes == 0:
        return np.empty(shape, dtype)
    array: Array = allocate(nbytes).view(dtype).reshape(shape)
    return array
