# SPDX-License-Identifier: Apache-2.0
"""Torch's tensors on the GPU test double: CPU tensors that farandole takes for tensors on GPUs.

The double's memory is host memory, so all of torch works on it, at once; only what farandole does
comes late. So whoever makes a stream wait here waits himself: torch's work on a CPU is in no
stream. All of the adapter is the real one but the five functions in which torch's own CUDA would
be called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import farandole.torch as hvd
from farandole.arrays.cuda_array import CudaArray
from farandole.calls import gpu_handle
from farandole.torch import cuda, kind
from harness.gpu_double import Gpu, use_double

__all__ = ["gpu", "pretend"]

_gpu: Gpu | None = None
_join_stream = gpu_handle.join_stream


def pretend() -> None:
    """From the next init() on, in this process."""
    use_double()
    kind.device_and_stream = _device_and_stream
    cuda.current_stream = lambda ordinal: gpu().stream
    cuda.bytes_over = _bytes_over
    gpu_handle.join_stream = _join


def gpu() -> Gpu:
    """This rank's, whose one stream is torch's current one."""
    global _gpu
    if _gpu is None:
        _gpu = Gpu(hvd.rank())
    return _gpu


def _device_and_stream(device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        raise TypeError(f"tensors on device {device} cannot be sent: the double has no such one")
    return cuda.place(torch.device("cuda", gpu().device))


def _join(handles: Sequence[int], stream: int) -> None:
    _join_stream(handles, stream)
    gpu().synchronize(stream)


def _bytes_over(memory: CudaArray) -> Tensor:
    gpu().synchronize(memory.stream)
    raw: Any = (ctypes.c_uint8 * memory.shape[0]).from_address(memory.address)
    raw.owner = memory  # which the tensor keeps alive
    return torch.from_numpy(np.frombuffer(raw, np.uint8))
