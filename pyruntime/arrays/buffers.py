# SPDX-License-Identifier: Apache-2.0
"""Buffers: arrays as (pointer, dtype, shape, device, stream), and the kinds of arrays on CPUs.
Every call is made from them; any thread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from farandole._library import ffi
from farandole.arrays.kinds import Kind, Shape, register

# The names in enum farandole_dtype, by its values.
DTYPES: tuple[str, ...] = tuple(
    constant.removeprefix("FARANDOLE_").lower()
    for _, constant in sorted(ffi.typeof("enum farandole_dtype").elements.items())
)
# Types of ml_dtypes that NumPy lacks, and the NumPy type of the same memory.
_SEEN_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_CODES = {np.dtype(name): code for code, name in enumerate(DTYPES) if name not in _SEEN_AS}

# The address of all tensors without elements; a null pointer would mean "no contribution".
_EMPTY_MEMORY = ffi.new("double[1]")
EMPTY = int(ffi.cast("uintptr_t", _EMPTY_MEMORY))
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
    """An array as the core needs it: always C-contiguous; device -1 is the CPU.

    `owner` keeps the memory alive: the array itself, a view of it, or a contiguous copy.
    """

    pointer: int
    dtype: int
    shape: Shape
    owner: object
    device: int = -1
    stream: int = 0


def _sharing(buffers: Sequence[Buffer]) -> Iterator[tuple[int, int]]:
    """(i, j) of each buffer j that shares memory with one at a lower address, i."""
    end = last = 0
    for i, buffer in sorted(enumerate(buffers), key=lambda pair: pair[1].pointer):
        nbytes = math.prod(buffer.shape) * dtype_of(buffer.dtype).itemsize
        if nbytes and buffer.pointer < end:
            yield last, i
        if buffer.pointer + nbytes > end:
            end, last = buffer.pointer + nbytes, i


def check_apart(buffers: Sequence[Buffer]) -> None:
    """Raises ValueError if two tensors that are to be reduced in place share memory.

    Some of their elements would be reduced twice, and others once, depending on the rank.
    """
    for i, j in _sharing(buffers):
        raise ValueError(
            f"tensors[{min(i, j)}] and tensors[{max(i, j)}] share memory, which would be reduced "
            "twice in place: pass it once, or use the call that is not in place"
        )


def turns(buffers: Sequence[Buffer]) -> dict[int, int]:
    """For each buffer that must wait for its turn, since it shares memory with others: the one
    before it. Turns follow the order of `buffers`."""
    group = list(range(len(buffers)))  # by buffer: the lowest number of those that it meets
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
    """Memory that the core allocated for a result (bytes on the CPU). Freed with its last view."""

    __slots__ = ("__array_interface__", "_pointer", "dtype", "shape")

    def __init__(self, pointer: Any, dtype: int, shape: Shape) -> None:
        """`pointer` owns the memory, see farandole.calls.handles.take; `dtype` is a core code.

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


def code_of(dtype: np.dtype[Any]) -> int:
    """The core's code of a NumPy dtype; raises TypeError where there is none."""
    code = _CODES.get(dtype)
    if code is not None:
        return code
    if dtype.name in _SEEN_AS:
        return DTYPES.index(dtype.name)
    raise TypeError(f"dtype {dtype} cannot be sent; supported: {', '.join(DTYPES)}")


def dtype_of(code: int) -> np.dtype[Any]:
    """NumPy's dtype of a core code; for types of ml_dtypes an integer of the same size."""
    return np.dtype(_SEEN_AS.get(DTYPES[code], DTYPES[code]))


class NumpyKind(Kind):
    """NumPy arrays and scalars; whatever NumPy can view without a copy derives from this."""

    gives_pointers = True  # the address as a number would take NumPy 1.5 us

    def matches(self, x: Any) -> bool:
        """Whether `x` is an array or a scalar of NumPy."""
        return isinstance(x, (np.ndarray, np.generic))

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        """`x` as a NumPy array over the same memory."""
        return np.asarray(x)

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        """A NumPy array as an array of `like`'s kind."""
        return result

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """The memory of the view of `x`, or of a contiguous copy of it."""
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                "a masked array cannot be sent: send x.filled(value), or x.data and x.mask"
            )
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
        """A pointer that keeps the memory of `x`, twice; (0, None) if `x` differs or would be
        copied."""
        if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape:
            return 0, None
        try:
            pointer = _from_buffer(x, in_place)
        except ValueError:  # not contiguous, or read-only, or a dtype that no buffer has
            return 0, None
        return pointer, pointer

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """A new array of the same kind, dtype and, without `shape`, shape as `like`."""
        view = self.view(like)
        return self.give(np.empty(view.shape if shape is None else shape, view.dtype), like)

    def wrap(self, memory: Any, like: Any) -> Any:
        """An array of `like`'s kind and dtype over a result's memory."""
        return self.give(np.asarray(memory).view(self.view(like).dtype), like)


class _InterfaceKind(NumpyKind):
    """Objects with `__array_interface__`: NumPy reads them, results are NumPy arrays."""

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__array_interface__")


for _place, _kind in enumerate((NumpyKind(), _InterfaceKind())):
    register(_kind, _place)
