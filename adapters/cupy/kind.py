# SPDX-License-Identifier: Apache-2.0
"""Describes CuPy arrays to the core, on the caller's thread.

Importing this module registers CupyKind.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import cupy

from farandole.arrays.buffers import EMPTY, Buffer, address_or_empty, code_of
from farandole.arrays.kinds import Kind, Shape, Stream, register
from farandole.errors import LibraryError


class CupyKind(Kind):
    """Dense CuPy arrays of every dtype that the core supports, in CuPy's current stream."""

    def matches(self, x: Any) -> bool:
        """Returns True if `x` is a CuPy array."""
        return isinstance(x, cupy.ndarray)

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Returns the GPU memory of `x`, or of a contiguous copy, and the current stream."""
        code = code_of(x.dtype)
        if not x.flags.c_contiguous:
            if in_place:
                raise ValueError(
                    f"an array with strides {x.strides} is not contiguous: it cannot be changed in "
                    "place; use the out-of-place call, or cupy.ascontiguousarray"
                )
            x = _made(x.device, cupy.ascontiguousarray, x)
        pointer = address_or_empty(int(x.data.ptr), x.shape, "a CuPy array")
        return Buffer(pointer, code, x.shape, x, int(x.device.id), self.stream(x))

    def lent(
        self, x: Any, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[int, object]:
        """Returns (address, `x`) if `x` has this form and needs no copy, else (0, None)."""
        if x.dtype != dtype or x.shape != shape or not x.flags.c_contiguous or x.device != device:
            return 0, None
        return int(x.data.ptr) if x.size else EMPTY, x

    def stream(self, x: Any) -> int:
        """Returns CuPy's current stream on the array's device."""
        with x.device:
            current = cupy.cuda.get_current_stream()
        return Stream(current.ptr, current)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """Returns a new contiguous array with the dtype and device of `like`.

        By default, the array also has the shape of `like`.
        """
        return _made(like.device, cupy.empty, like.shape if shape is None else shape, like.dtype)

    def wrap(self, memory: Any, like: Any) -> Any:
        """Wraps a result's memory in an array, without copying.

        Does not use cupy.asarray, which would wait for the memory's stream.
        """
        interface = memory.__cuda_array_interface__
        nbytes = like.dtype.itemsize * prod(interface["shape"])
        if nbytes == 0:
            return self.empty(like, interface["shape"])
        owned = cupy.cuda.UnownedMemory(interface["data"][0], nbytes, memory, int(like.device.id))
        pointer = cupy.cuda.MemoryPointer(owned, 0)
        return cupy.ndarray(interface["shape"], like.dtype, memptr=pointer)


def _made(device: Any, make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a new array on `device`. Raises LibraryError on all ranks if GPU memory is short."""
    try:
        with device:
            return make(*arguments)
    except MemoryError as reason:
        raise LibraryError(f"CuPy: {reason}") from reason


register(CupyKind())
