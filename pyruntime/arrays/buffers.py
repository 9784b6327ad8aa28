# SPDX-License-Identifier: Apache-2.0
"""Describes arrays to the core as buffers (pointer, dtype, shape, device, stream), and implements
the kinds of CPU arrays. This module may be used from any thread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from farandole._library import check, ffi, lib
from farandole.arrays.kinds import Kind, Shape, register

# Names of enum farandole_dtype, indexed by value.
DTYPES: tuple[str, ...] = tuple(
    constant.removeprefix("FARANDOLE_").lower()
    for _, constant in sorted(ffi.typeof("enum farandole_dtype").elements.items())
)
# Maps each dtype of ml_dtypes that NumPy lacks to the NumPy dtype in which its memory is viewed.
_SEEN_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_CODES = {np.dtype(name): code for code, name in enumerate(DTYPES) if name not in _SEEN_AS}

# The address of every tensor without elements. Null would mean that the rank has no tensor.
_EMPTY_MEMORY = ffi.new("double[1]")
EMPTY = int(ffi.cast("uintptr_t", _EMPTY_MEMORY))
_int64s = partial(ffi.new, ffi.typeof("int64_t[]"))
_from_buffer = partial(ffi.from_buffer, ffi.typeof("char[]"))


def address_or_empty(pointer: int, shape: Shape, what: str) -> int:
    """Returns `pointer`, or EMPTY if `shape` has no elements. Raises ValueError if a shape that has
    elements comes with a null pointer."""
    if 0 in shape:
        return EMPTY
    if not pointer:
        raise ValueError(
            f"{what} of shape {shape} has no memory: its address is null, because it was "
            "freed, moved or given away"
        )
    return pointer


def check_unused(
    address: int, size: int, shape: Sequence[int], strides: Sequence[int], writes: bool = False
) -> None:
    """Raises ValueError if an earlier, unfinished call writes to this CPU memory. If `writes` is
    true, also raises ValueError if such a call reads the memory. Call this before you copy from or
    to the user's memory, because the core checks only memory that is passed to it. `size` is the
    number of bytes per element. `strides` are in bytes."""
    sizes = _int64s(shape), _int64s(strides)
    check(lib.farandole_check_unused(address, size, len(shape), *sizes, writes))


@dataclass(frozen=True, slots=True)
class Buffer:
    """A C-contiguous array in the form that the core needs. Device -1 is the CPU.

    `owner` keeps the memory alive. It is the array itself, a view, or a contiguous copy.
    """

    pointer: int
    dtype: int
    shape: Shape
    owner: object
    device: int = -1
    stream: int = 0


def _sharing(buffers: Sequence[Buffer]) -> Iterator[tuple[int, int]]:
    """Yields (i, j) for each buffer j that overlaps a buffer i whose address is lower or equal."""
    end = last = 0
    for i, buffer in sorted(enumerate(buffers), key=lambda pair: pair[1].pointer):
        nbytes = math.prod(buffer.shape) * dtype_of(buffer.dtype).itemsize
        if nbytes and buffer.pointer < end:
            yield last, i
        if buffer.pointer + nbytes > end:
            end, last = buffer.pointer + nbytes, i


def check_apart(buffers: Sequence[Buffer]) -> None:
    """Raises ValueError if two tensors share memory. An in-place call would reduce the shared
    elements twice on some ranks."""
    for i, j in _sharing(buffers):
        raise ValueError(
            f"tensors[{min(i, j)}] and tensors[{max(i, j)}] share memory: an in-place call would "
            "reduce it twice; pass it once, or use the out-of-place call"
        )


def turns(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Returns an order in which to send buffers that share memory. The result maps each such
    buffer, except the first of its group, to the buffer that must be sent just before it. Keys and
    values are indices into `buffers`.
    """
    group = list(range(len(buffers)))  # for each buffer, the lowest index in its group of overlaps
    for i, j in _sharing(buffers):
        lower, upper = sorted((group[i], group[j]))
        group = [lower if g == upper else g for g in group]
    before: dict[int, int] = {}
    newest: dict[int, int] = {}
    for i, g in enumerate(group):
        if g in newest:
            before[i] = newest[g]
        newest[g] = i
    return before


class ResultMemory:
    """CPU memory that the core allocated for a result. It is freed together with its last view."""

    __slots__ = ("__array_interface__", "_pointer", "dtype", "shape")

    def __init__(self, pointer: Any, dtype: int, shape: Shape) -> None:
        """`pointer` owns the memory (see farandole.calls.handles.take). `dtype` is the core's code.

        Raises ValueError if the pointer is null, unless the shape has no elements.
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


def code_of(dtype: np.dtype[Any]) -> int:
    """Returns the core's code for a NumPy dtype. Raises TypeError if there is none."""
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.name in _SEEN_AS and dtype.isnative:
        return DTYPES.index(dtype.name)
    raise TypeError(f"dtype {dtype} cannot be sent; supported: {', '.join(DTYPES)}")


def dtype_of(code: int) -> np.dtype[Any]:
    """Returns the NumPy dtype for the core's code of a dtype. For a dtype of ml_dtypes, returns an
    unsigned integer of the same size."""
    return np.dtype(_SEEN_AS.get(DTYPES[code], DTYPES[code]))


class NumpyKind(Kind):
    """NumPy arrays and scalars. Base class for kinds whose arrays NumPy can view without a copy."""

    gives_pointers = True  # NumPy needs 1.5 us to return the address as an int

    def matches(self, x: Any) -> bool:
        """True for a NumPy array or scalar."""
        return isinstance(x, (np.ndarray, np.generic))

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        """Returns a NumPy array over the memory of `x`."""
        return np.asarray(x)

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        """Converts a NumPy array to an array of the kind of `like`."""
        return result

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Describes the memory of `x`, or a contiguous copy of it."""
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                "a masked array cannot be sent: send x.filled(value), or x.data and x.mask"
            )
        view = self.view(x)
        if in_place and (not view.flags.writeable or isinstance(x, np.generic)):
            raise ValueError(
                f"a {type(x).__name__} is read-only, so it cannot be changed in place: "
                "pass a writable copy"
            )
        if not view.flags.c_contiguous:
            if in_place:
                raise ValueError(
                    f"an array with strides {view.strides} is not contiguous: it cannot be changed "
                    "in place; use the out-of-place call, or numpy.ascontiguousarray"
                )
            address = view.__array_interface__["data"][0]
            check_unused(address, view.itemsize, view.shape, view.strides)
            view = view.copy(order="C")
        code, pointer = code_of(view.dtype), view.__array_interface__["data"][0]
        return Buffer(address_or_empty(pointer, view.shape, "an array"), code, view.shape, view)

    def lent(
        self, x: Any, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[Any, object]:
        """Returns a cffi pointer twice: it is both the address and the object that keeps the memory
        alive. Returns (0, None) if `x` has a different form or would have to be copied."""
        if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape:
            return 0, None
        try:
            pointer = _from_buffer(x, in_place)
        except ValueError:  # not contiguous, read-only, or of a dtype without buffer protocol
            return 0, None
        return pointer, pointer

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """Returns a new array of the kind and dtype of `like`. If `shape` is None, the new array
        also has the shape of `like`."""
        view = self.view(like)
        return self.give(np.empty(view.shape if shape is None else shape, view.dtype), like)

    def wrap(self, memory: Any, like: Any) -> Any:
        """Wraps a result's memory in an array of the kind and dtype of `like`."""
        return self.give(np.asarray(memory).view(self.view(like).dtype), like)


class _InterfaceKind(NumpyKind):
    """Objects with `__array_interface__`. Their results are NumPy arrays."""

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__array_interface__")


for _place, _kind in enumerate((NumpyKind(), _InterfaceKind())):
    register(_kind, _place)
