# SPDX-License-Identifier: Apache-2.0
"""Buffers: an array as (pointer, dtype, shape, device, stream), and the kinds of arrays on CPUs."""

from __future__ import annotations

import array
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from farandole._library import ffi, lib
from farandole.arrays.kinds import Kind, Shape, register

__all__ = [
    "DTYPES",
    "EMPTY",
    "NOWHERE",
    "Buffer",
    "Memory",
    "address_or_empty",
    "code_of",
    "dtype_of",
]

# The names in enum farandole_dtype, by its values.
DTYPES: tuple[str, ...] = tuple(
    constant.removeprefix("FARANDOLE_").lower()
    for _, constant in sorted(ffi.typeof("enum farandole_dtype").elements.items())
)
# What ml_dtypes knows and NumPy does not, and the type as which NumPy sees its memory.
_SEEN_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_CODES = {np.dtype(name): code for code, name in enumerate(DTYPES) if name not in _SEEN_AS}

# Where tensors without elements point, and no other ones: a null pointer would mean "no
# contribution".
_EMPTY_MEMORY = ffi.new("double[1]")
EMPTY = int(ffi.cast("uintptr_t", _EMPTY_MEMORY))
NOWHERE = (0, 0)  # no window, at no byte of it
_from_buffer = partial(ffi.from_buffer, ffi.typeof("char[]"))


def address_or_empty(pointer: int, shape: Shape, what: str) -> int:
    """`pointer`, or EMPTY for a shape without elements. ValueError for null with elements."""
    if 0 in shape:
        return EMPTY
    if not pointer:
        raise ValueError(
            f"{what} of shape {shape} has no memory, its address is null: it was freed, moved or "
            "given away before"
        )
    return pointer


@dataclass(frozen=True, slots=True)
class Buffer:
    """What the core learns about an array: always C-contiguous; device -1 is the CPU.

    `owner` keeps the memory alive: the array itself, a view of it, or a contiguous copy. `place`:
    the window in which a tensor on a GPU is reduced, by its number, and the byte there.
    """

    pointer: int
    dtype: int
    shape: Shape
    owner: object
    device: int = -1
    stream: int = 0
    place: tuple[int, int] = NOWHERE


class Memory:
    """Memory that the core allocated for a result (bytes on the CPU). Freed with its last view."""

    __slots__ = ("__array_interface__", "_pointer", "dtype", "shape")

    def __init__(self, pointer: Any, dtype: int, shape: Shape) -> None:
        """Takes over `pointer`, which came from farandole_take; `dtype` is a core code.

        Raises ValueError for a null pointer, unless the shape has no elements.
        """
        self._pointer = pointer
        address = address_or_empty(int(ffi.cast("uintptr_t", pointer)), shape, "a result")
        self.dtype = dtype
        self.shape = shape
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype_of(dtype).str,
            "data": (address, False),
        }

    def __del__(self, free: Any = lib.farandole_free) -> None:
        free(self._pointer)


def code_of(dtype: np.dtype[Any]) -> int:
    """The core's code of a NumPy dtype; raises TypeError where there is none."""
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.name in _SEEN_AS:
        return DTYPES.index(dtype.name)
    raise TypeError(f"dtype {dtype} cannot be sent; supported: {', '.join(DTYPES)}")


def dtype_of(code: int) -> np.dtype[Any]:
    """NumPy's dtype of a core code; of what only ml_dtypes knows, an integer of its size."""
    return np.dtype(_SEEN_AS.get(DTYPES[code], DTYPES[code]))


class NumpyKind(Kind):
    """NumPy arrays and scalars; whatever NumPy can view without a copy derives from this."""

    gives_pointers = True  # NumPy takes 1.5 us to tell the number

    def matches(self, x: Any) -> bool:
        return isinstance(x, (np.ndarray, np.generic))

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        """`x` as a NumPy array over the same memory."""
        return np.asarray(x)

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        """A NumPy array as an array of `like`'s kind."""
        return result

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        view = self.view(x)
        if in_place and (not view.flags.writeable or isinstance(x, np.generic)):
            raise ValueError(f"a read-only {type(x).__name__} cannot be changed in place")
        if not view.flags.c_contiguous:
            if in_place:
                raise ValueError(
                    f"an array with strides {view.strides} is not contiguous: it cannot be changed "
                    "in place; use the out-of-place call, or numpy.ascontiguousarray"
                )
            view = view.copy(order="C")
        code, pointer = code_of(view.dtype), view.__array_interface__["data"][0]
        return Buffer(address_or_empty(pointer, view.shape, "an array"), code, view.shape, view)

    def lent(
        self, x: Any, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[Any, object]:
        if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape:
            return 0, None
        try:
            pointer = _from_buffer(x, in_place)
        except ValueError:  # not contiguous, or read-only, or no type of the buffer protocol
            return 0, None
        return pointer, pointer

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        view = self.view(like)
        return self.give(np.empty(view.shape if shape is None else shape, view.dtype), like)

    def wrap(self, memory: Any, like: Any) -> Any:
        return self.give(np.asarray(memory).view(self.view(like).dtype), like)


class InterfaceKind(NumpyKind):
    """Objects with `__array_interface__`: NumPy reads them, results are NumPy arrays."""

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__array_interface__")


class DlpackKind(NumpyKind):
    """CPU arrays with DLPack; array-API libraries get results of their own kind, others NumPy's.

    Part of cuda_array.DeviceKind, for whether an array is on the CPU its type does not tell.
    """

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, np.ndarray):  # a result, where x's library has no array-API namespace
            return x
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as reason:
            raise TypeError(f"{type(x).__name__} is not readable on the CPU: {reason}") from reason

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return namespace().from_dlpack(result) if namespace else result


class BytesKind(NumpyKind):
    """The buffer protocol: array.array and bytearray in kind, memoryviews for other exporters."""

    def matches(self, x: Any) -> bool:
        try:
            memoryview(x).release()
        except TypeError:
            return False
        return True

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(memoryview(x))

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        if isinstance(like, array.array):
            return array.array(like.typecode, result.tobytes())
        exporter: Any = result
        return bytearray(exporter) if isinstance(like, bytearray) else memoryview(exporter)


for _place, _kind in enumerate((NumpyKind(), InterfaceKind(), BytesKind())):
    register(_kind, _place)
