# SPDX-License-Identifier: Apache-2.0
"""Allocates arrays that all ranks of a host can map, so that collectives need not copy them.

Used by every adapter's empty() and by gradient_as_bucket_view. May be called from any thread.
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
    """Bytes in this process's arena. They are freed when no view of them is left."""

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
    """Returns a zeroed uint8 array of shape (nbytes,) in memory that the host's ranks can map.

    Raises LibraryError if memory is short.
    """
    return np.asarray(_ArenaMemory(nbytes))


def empty(shape: int | Sequence[int], dtype: Any = float) -> Array:
    """Returns an uninitialised array in shared memory, so that collectives need not copy it.

    All ranks of the host can map the memory. The array and its views behave like any other array.
    Copies and pickles of it are ordinary arrays. farandole allocates whole pages, so prefer a few
    large arrays. The call is not collective: each rank may create any number of arrays, before or
    after init(). A forked child, such as a DataLoader worker, sees the parent's values until the
    child writes. The parent never sees what the child writes.

    - shape: an int or a sequence of ints.
    - dtype: any dtype except Python objects.

    Raises LibraryError if memory is short, TypeError for a dtype of Python objects, and ValueError
    for negative dimensions.

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
