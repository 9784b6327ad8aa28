# SPDX-License-Identifier: Apache-2.0
"""GPU arrays without a framework. CudaArray wraps the core's memory. The kinds describe objects
that export their address through DLPack or `__cuda_array_interface__`."""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from farandole._library import check, check_count, ffi, lib
from farandole.arrays import dlpack
from farandole.arrays.buffers import DTYPES, Buffer, NumpyKind, address_or_empty, code_of, dtype_of
from farandole.arrays.kinds import Kind, Shape, Stream, register

LEGACY_STREAM = 1  # CUDA's handle of the legacy default stream
_LAST_DEFAULT = 2  # CUDA's handle of the per-thread default stream

# Pairs of (memory to free, the memory's stream). Memory cannot be freed while a graph captures its
# stream, so it waits here.
_dropped: deque[tuple[Any, int]] = deque()


def _free_dropped(dropped: Any = _dropped, free: Any = lib.farandole_free_on) -> None:
    for _ in range(len(dropped)):
        try:
            memory = dropped.popleft()
        except IndexError:  # another thread has emptied the queue
            return
        if not free(*memory):
            dropped.append(memory)


class _GpuMemory:
    """GPU memory that the core allocated. It is freed in its stream, after all work that the stream
    holds at that time."""

    def __init__(self, pointer: Any, device: int, stream: int) -> None:
        _free_dropped()
        self.pointer, self.device, self.stream = pointer, device, stream

    def __del__(self, dropped: Any = _dropped, free_dropped: Any = _free_dropped) -> None:
        dropped.append((self.pointer, self.stream))
        free_dropped()


class _BorrowedMemory:
    """GPU memory owned by `buffer.owner`. This object keeps the owner alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.pointer = ffi.cast("void*", buffer.pointer)
        self.device, self.stream, self._owner = buffer.device, buffer.stream, buffer.owner


class CudaArray:
    """A contiguous array on a GPU, returned for GPU arrays of a library that has no adapter.

    shape is a tuple of int, dtype is the name of a NumPy or ml_dtypes dtype, and device is CUDA's
    ordinal. The values are valid once the work that is now in `stream` is done. Other libraries can
    read the memory without a copy through DLPack or `__cuda_array_interface__` (version 3), in
    which bfloat16 appears as uint16. The memory is freed in the order of `stream`. If other streams
    read the memory, wait for them before you drop the array.
    """

    __slots__ = ("_allocation", "device", "dtype", "shape", "stream")

    def __init__(self, allocation: _GpuMemory | _BorrowedMemory, dtype: int, shape: Shape) -> None:
        """`dtype` is the core's code. Raises ValueError if the elements' memory is null."""
        self._allocation = allocation
        address_or_empty(self.address, shape, "a result on a GPU")
        self.device, self.stream = allocation.device, allocation.stream or LEGACY_STREAM
        self.dtype, self.shape = DTYPES[dtype], shape

    @classmethod
    def taken(cls, pointer: Any, dtype: int, shape: Shape, device: int, stream: int) -> CudaArray:
        """Takes ownership of `pointer` from farandole_take(). `stream` is the first to read it."""
        return cls(_GpuMemory(pointer, device, stream), dtype, shape)

    @classmethod
    def empty(cls, dtype: int, shape: Shape, device: int, stream: int) -> CudaArray:
        """Returns an uninitialised array for use in `stream`. Raises LibraryError if memory is
        short."""
        memory = ffi.new("void**")
        nbytes = dtype_of(dtype).itemsize * prod(shape)
        check(lib.farandole_allocate_on(device, nbytes, stream, memory))
        return cls(_GpuMemory(memory[0], device, stream), dtype, shape)

    @classmethod
    def over(cls, buffer: Buffer) -> CudaArray:
        """Returns a flat array over a buffer's memory, in the buffer's stream. The array keeps the
        buffer's owner alive."""
        return cls(_BorrowedMemory(buffer), buffer.dtype, (prod(buffer.shape),))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        pointer = self.address if 0 not in self.shape else 0
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": dtype_of(DTYPES.index(self.dtype)).str,
            "data": (pointer, False),
            "strides": None,
            "stream": self.stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Returns a capsule for a consumer that works in `stream`. None means the default stream;
        -1 means that the consumer needs no ordering."""
        if stream is None:
            stream = LEGACY_STREAM
        if stream not in (-1, self.stream):
            check(lib.farandole_order_streams(self.device, self.stream, stream))
        device = self.__dlpack_device__()
        return dlpack.capsule(self.address, device, self.dtype, self.shape, self._allocation)

    def bytes(self) -> CudaArray:
        """Returns an array of uint8 over the same memory, of shape (number of bytes,)."""
        itemsize = dtype_of(DTYPES.index(self.dtype)).itemsize
        count = itemsize * prod(self.shape)
        return CudaArray(self._allocation, DTYPES.index("uint8"), (count,))

    @property
    def address(self) -> int:
        """The device address of the first element."""
        return int(ffi.cast("uintptr_t", self._allocation.pointer))

    def __repr__(self) -> str:
        return f"CudaArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class _CpuDlpackKind(NumpyKind):
    """CPU arrays that support DLPack. Results are arrays of the same library if it has an array-API
    namespace, and otherwise NumPy arrays."""

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        if isinstance(x, np.ndarray):  # a result, if the library of `like` has no namespace
            return x
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as reason:
            raise TypeError(f"{type(x).__name__} is not readable on the CPU: {reason}") from reason

    def give(self, result: np.ndarray[Any, Any], like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return namespace().from_dlpack(result) if namespace else result


class _StreamOwner:
    """Holds the first array that named a stream. Results keep this array and the stream alive."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, array: object) -> None:
        self.array = array


_owners: WeakValueDictionary[int, _StreamOwner] = WeakValueDictionary()  # keyed by stream


def _named_stream(x: Any) -> int:
    """Returns the stream that an array names, or the default stream if it names none.

    All results in a stream keep alive only the first array that named the stream. If each result
    kept its own input alive, a chain of calls would keep every earlier result.
    """
    number = x.__cuda_array_interface__.get("stream") or LEGACY_STREAM
    if isinstance(number, Stream) or number <= _LAST_DEFAULT:
        return number
    owner = _owners.get(number)
    if owner is None:
        owner = _owners[number] = _StreamOwner(x)
    return Stream(number, owner)


class _CudaKind(Kind):
    """Objects with a `__cuda_array_interface__`. The interface names the stream of the object.

    Results are arrays of the same library if it has an array-API namespace, and otherwise
    CudaArrays.
    """

    def matches(self, x: Any) -> bool:
        return hasattr(x, "__cuda_array_interface__")

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Describes `x` without a copy. Raises ValueError if `x` is not contiguous."""
        interface = x.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError("a masked array cannot be sent: fill it first")
        dtype = np.dtype(interface["typestr"])
        code = DTYPES.index(x.dtype) if isinstance(x, CudaArray) else code_of(dtype)
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        if strides is not None:
            strides = tuple(step // dtype.itemsize for step in strides)
        pointer, read_only = interface["data"]
        if in_place and read_only:
            raise ValueError(
                f"a {type(x).__name__} is read-only, so it cannot be changed in place: "
                "pass a writable copy"
            )
        return _buffer(x, pointer, code, shape, strides, self.stream(x), x)

    def stream(self, x: Any) -> int:
        return _named_stream(x)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        b = self.describe(like)
        made = CudaArray.empty(b.dtype, b.shape if shape is None else shape, b.device, b.stream)
        return self.give(made, like)

    def wrap(self, memory: Any, like: Any) -> Any:
        return self.give(memory, like)

    def give(self, result: CudaArray, like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return namespace().from_dlpack(result) if namespace else result


class _CudaDlpackKind(_CudaKind):
    """GPU arrays that support only DLPack, which names no stream. They use the default stream."""

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        if isinstance(x, CudaArray):  # a result, if the library of `like` has no namespace
            return super().describe(x, in_place)
        capsule = x.__dlpack__(stream=LEGACY_STREAM)
        info = dlpack.read(capsule)
        if info.dtype not in DTYPES:
            raise TypeError(f"dtype {info.dtype} cannot be sent; supported: {', '.join(DTYPES)}")
        code = DTYPES.index(info.dtype)
        owner = (x, capsule)
        return _buffer(x, info.pointer, code, info.shape, info.strides, LEGACY_STREAM, owner)

    def stream(self, x: Any) -> int:
        return LEGACY_STREAM


class _DeviceKind(Kind):
    """Arrays with DLPack or `__cuda_array_interface__`. Each array's device decides the kind."""

    def __init__(self) -> None:
        self._cpu, self._interface, self._dlpack = _CpuDlpackKind(), _CudaKind(), _CudaDlpackKind()

    def _of(self, x: Any) -> Kind:
        if hasattr(x, "__cuda_array_interface__"):
            return self._interface
        on_gpu = x.__dlpack_device__()[0] == dlpack.CUDA
        return self._dlpack if on_gpu else self._cpu

    def matches(self, x: Any) -> bool:
        return self._cpu.matches(x) or self._interface.matches(x)

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        return self._of(x).describe(x, in_place)

    def stream(self, x: Any) -> int:
        return self._of(x).stream(x)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        return self._of(like).empty(like, shape)

    def wrap(self, memory: Any, like: Any) -> Any:
        return self._of(like).wrap(memory, like)


def _buffer(
    x: Any,
    pointer: int,
    code: int,
    shape: Shape,
    strides: Shape | None,
    stream: int,
    owner: object,
) -> Buffer:
    """Builds a Buffer. `strides` are in elements; None means contiguous."""
    if strides is not None and not _contiguous(shape, strides):
        raise ValueError(
            f"an array on a GPU with strides {strides} is not contiguous: make a contiguous "
            "copy with its library first"
        )
    address = address_or_empty(pointer, shape, f"a {type(x).__name__}")
    return Buffer(address, code, shape, owner, _device(x, pointer), stream)


def _device(x: Any, pointer: int) -> int:
    """Returns CUDA's ordinal for the device of `x`. For an empty array that names no device,
    returns this rank's GPU."""
    if hasattr(x, "__dlpack_device__"):
        return int(x.__dlpack_device__()[1])
    return check_count(lib.farandole_device_of(pointer))


def _contiguous(shape: Shape, strides: Shape) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


register(_DeviceKind(), 1_000)  # last, so that more specific kinds match first
