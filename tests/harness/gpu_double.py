# SPDX-License-Identifier: Apache-2.0
"""Arrays on the GPU test double: device memory is host memory, behind streams that run late."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Array", "Gpu", "use_double"]

ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = ROOT / "build" / "release" / "tests" / "libgpu_double.so"
REAL_NCCL = os.environ.get("FARANDOLE_TEST_NCCL")  # its host code: make test-nccl
_Raw = np.ndarray[Any, np.dtype[Any]]


def use_double() -> None:
    """From the next init() on this process's GPUs are the double's; ranks are processes."""
    for name in ("CUDA", "NCCL", "NVRTC"):
        os.environ[f"FARANDOLE_{name}_LIBRARY"] = str(_LIBRARY)
    if REAL_NCCL:
        os.environ["FARANDOLE_NCCL_LIBRARY"] = REAL_NCCL
    os.environ["GPU_DOUBLE_FOLDER"] = os.environ["FARANDOLE_TEST_FOLDER"]


def _call(function: Any, *arguments: Any) -> None:
    result = function(*arguments)
    assert result == 0, f"{function.__name__}: {result}"


class Gpu:
    """One device and a stream of the user's own there; `lib` has all functions of the double."""

    def __init__(self, device: int) -> None:
        self.lib = ctypes.CDLL(str(_LIBRARY))
        self.device = device
        self._context, self._pool = ctypes.c_void_p(), ctypes.c_void_p()
        _call(self.lib.cuDevicePrimaryCtxRetain, ctypes.byref(self._context), device)
        _call(self.lib.cuMemPoolCreate, ctypes.byref(self._pool), None)
        self.stream = self.new_stream()

    def new_stream(self) -> int:
        """Another stream."""
        stream = ctypes.c_void_p()
        self._do("cuStreamCreateWithPriority", ctypes.byref(stream), 0, 0)
        return stream.value or 0

    def array(self, values: Any, stream: int | None = None) -> Array:
        """A new array whose values come late."""
        made = Array(self, np.asarray(values), self.stream if stream is None else stream)
        made.write(values)
        return made

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Late, in stream order."""
        where = (ctypes.c_uint64(target), ctypes.c_uint64(source))
        self._do("cuMemcpyAsync", *where, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """Blocks until the stream has done all that is in it."""
        event = ctypes.c_void_p()
        self._do("cuEventCreate", ctypes.byref(event), 0)
        self._do("cuEventRecord", event, ctypes.c_void_p(stream))
        self._do("cuEventSynchronize", event)
        self._do("cuEventDestroy_v2", event)

    def read(self, x: Any, stream: int | None = None) -> _Raw:
        """What is in an array once its stream, or another one, has come so far."""
        told = x.__cuda_array_interface__
        result = np.empty(told["shape"], told["typestr"])
        stream = told["stream"] if stream is None else stream
        self.copy(result.ctypes.data, told["data"][0], result.nbytes, stream)
        self.synchronize(stream)
        return result

    def allocate(self, nbytes: int, stream: int) -> int:
        """In stream order; poisoned."""
        address = ctypes.c_uint64()
        sizes = (ctypes.c_size_t(nbytes), self._pool, ctypes.c_void_p(stream))
        self._do("cuMemAllocFromPoolAsync", ctypes.byref(address), *sizes)
        return address.value

    def free(self, address: int, stream: int) -> None:
        """In stream order."""
        self._do("cuMemFreeAsync", ctypes.c_uint64(address), ctypes.c_void_p(stream))

    def gate(self, stream: int) -> int:
        """A slow kernel: the stream stops here until open()."""
        return int(self.lib.gpu_double_gate(ctypes.c_void_p(stream)))

    def open(self, gate: int) -> None:
        """Ends it."""
        self.lib.gpu_double_open(gate)

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being made of what comes into the stream."""
        status = ctypes.c_int()
        _call(self.lib.cuStreamIsCapturing, ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value != 0

    def capture(self, stream: int) -> None:
        """Begins the capture of a graph, by this thread."""
        self.lib.gpu_double_capture(ctypes.c_void_p(stream))

    def end_capture(self, stream: int) -> None:
        """Ends it; a RuntimeError if somebody has spoiled the graph."""
        if result := self.lib.gpu_double_end_capture(ctypes.c_void_p(stream)):
            raise RuntimeError(f"the capture is spoiled: {result}")

    def _do(self, name: str, *arguments: Any) -> None:
        popped = ctypes.c_void_p()
        _call(self.lib.cuCtxPushCurrent_v2, self._context)
        try:
            _call(getattr(self.lib, name), *arguments)
        finally:
            self.lib.cuCtxPopCurrent_v2(ctypes.byref(popped))


class Array:
    """A contiguous array of no library that farandole knows."""

    def __init__(self, gpu: Gpu, like: _Raw, stream: int) -> None:
        self.gpu, self.stream = gpu, stream
        self.shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes
        self.address = gpu.allocate(max(1, like.nbytes), stream)
        self._sources: list[_Raw] = []
        self.read_only = False

    def write(self, values: Any) -> None:
        """In stream order, so late."""
        source = np.array(values, self.dtype, order="C")
        self._sources.append(source)
        self.gpu.copy(self.address, source.ctypes.data, self.nbytes, self.stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, self.read_only),
            "stream": self.stream,
        }

    def __del__(self) -> None:
        if not self.gpu.is_capturing(self.stream):  # else the graph would be spoiled
            self.gpu.free(self.address, self.stream)
        if self._sources:
            self.gpu.synchronize(self.stream)  # the copies read them
