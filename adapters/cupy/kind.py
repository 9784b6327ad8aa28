# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays as an array kind: the neutral calls use it, on the caller's thread. Importing this
module registers it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import cupy

from farandole.arrays.buffers import EMPTY, Buffer, address_or_empty, code_of
from farandole.arrays.kinds import Kind, Shape, Stream, register
from farandole.errors import LibraryError


class CupyKind(Kind):
    """Dense CuPy arrays of every dtype the core knows, in CuPy's current stream."""

    def matches(self, x: Any) -> bool:
        """Whether `x` is an array of CuPy."""
        return isinstance(x, cupy.ndarray)

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """The GPU memory of `x`, or of a contiguous copy of it, and the current stream."""
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
        """(address of `x`, `x`) if it has this form and would not be copied; else (0, None)."""
        if x.dtype != dtype or x.shape != shape or not x.flags.c_contiguous or x.device != device:
            return 0, None
        return int(x.data.ptr) if x.size else EMPTY, x

    def stream(self, x: Any) -> int:
        """CuPy's current stream of the array's device."""
        with x.device:
            current = cupy.cuda.get_current_stream()
        return Stream(current.ptr, current)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """A new contiguous array of `like`'s dtype and device; by default of its shape too."""
        return _made(like.device, cupy.empty, like.shape if shape is None else shape, like.dtype)

    def wrap(self, memory: Any, like: Any) -> Any:
        """An array over a result's memory. Does not use cupy.asarray, which waits until the
        memory's stream is idle."""
        told = memory.__cuda_array_interface__
        nbytes = like.dtype.itemsize * prod(told["shape"])
        if nbytes == 0:
            return self.empty(like, told["shape"])
        owned = cupy.cuda.UnownedMemory(told["data"][0], nbytes, memory, int(like.device.id))
        pointer = cupy.cuda.MemoryPointer(owned, 0)
        return cupy.ndarray(told["shape"], like.dtype, memptr=pointer)


def _made(device: Any, make: Callable[..., Any], *arguments: Any) -> Any:
    """A new array on the device. Raises LibraryError, on the peers too, if memory is short."""
    try:
        with device:
            return make(*arguments)
    except MemoryError as reason:
        raise LibraryError(f"CuPy: {reason}") from reason


register(CupyKind())
