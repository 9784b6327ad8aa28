# SPDX-License-Identifier: Apache-2.0
"""The libraries whose arrays on GPUs the tests send: the same few things of each."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from harness.arrays import DTYPES, Array

__all__ = ["CASES", "LIBRARIES", "Arrays", "Cupy", "Library", "Torch", "slow"]

_SLOW = r"""
extern "C" __global__ void slow(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


class Arrays(Protocol):
    """A library's arrays, there and back; all work is queued in the current stream, get() waits."""

    def put(self, x: Array, dtype: str) -> Any:
        """An array of this dtype with these values; bfloat16 from float32."""

    def get(self, x: Any) -> Array:
        """The values; bfloat16 as float32."""


class Library(Arrays, Protocol):
    """And streams."""

    def full(self, count: int, value: float) -> Any:
        """float32."""

    def stream(self) -> Any:
        """A new one, which waits for no other."""

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes it the current one."""

    def pointer(self, stream: Any) -> int:
        """The CUDA handle."""

    def idle(self, stream: Any) -> bool:
        """Whether all work in it is done; waits for none."""


class Cupy:
    """CuPy arrays."""

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy

    def put(self, x: Array, dtype: str) -> Any:
        return self._cupy.asarray(np.asarray(x, dtype))

    def get(self, x: Any) -> Array:
        assert isinstance(x, self._cupy.ndarray)
        return np.asarray(self._cupy.asnumpy(x))

    def full(self, count: int, value: float) -> Any:
        return self._cupy.full(count, value, self._cupy.float32)

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = stream
        return context

    def pointer(self, stream: Any) -> int:
        return int(stream.ptr)

    def idle(self, stream: Any) -> bool:
        return bool(stream.done)


class Torch:
    """Torch tensors on the current GPU, or on the CPU."""

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self._torch: Any = torch
        self._device = device

    def put(self, x: Array, dtype: str) -> Any:
        return self._torch.from_numpy(np.array(x)).to(self._device, getattr(self._torch, dtype))

    def get(self, x: Any) -> Array:
        assert x.device.type == self._device
        wide = x.float() if x.dtype == self._torch.bfloat16 else x
        return np.asarray(wide.cpu().numpy())

    def full(self, count: int, value: float) -> Any:
        return self._torch.full((count,), value, device="cuda")

    def stream(self) -> Any:
        return self._torch.cuda.Stream()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream)
        return context

    def pointer(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def idle(self, stream: Any) -> bool:
        return bool(stream.query())


LIBRARIES: dict[str, type[Cupy] | type[Torch]] = {"cupy": Cupy, "torch": Torch}
# Torch shares what is beneath with CuPy: those of its dtypes that differ, or matter most.
CASES = [("cupy", dtype) for dtype in DTYPES]
CASES += [("torch", dtype) for dtype in ("bfloat16", "float16", "float32", "int64", "bool")]


@functools.cache
def _slow_kernel() -> Any:
    import cupy

    return cupy.RawKernel(_SLOW, "slow")


def slow(pointer: int, seconds: float) -> None:
    """Queues a kernel of this duration in the stream with this CUDA handle."""
    import cupy

    with cupy.cuda.ExternalStream(pointer):
        _slow_kernel()((1,), (1,), (np.uint64(seconds * 1e9),))
