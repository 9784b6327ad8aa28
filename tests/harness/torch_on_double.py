# SPDX-License-Identifier: Apache-2.0
"""Torch's tensors on the GPU test double: CPU tensors that farandole takes for tensors on GPUs.

The double's memory is host memory, so all of torch works on it, at once; only what farandole does
comes late. So whoever makes a stream wait here waits himself: torch's work on a CPU is in no
stream. All of the adapter is the real one but the four functions in which torch's own CUDA would
be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import farandole.torch as hvd
from farandole import gpu_handle
from farandole.cuda_array import CudaArray
from farandole.torch import cuda, kind
from harness.gpu_double import Gpu, use_double

__all__ = ["gpu", "pretend"]

_gpu: Gpu | None = None
_join_stream = gpu_handle.join_stream


def pretend() -> None:
    """From the next init() on, in this process."""
    use_double()
    kind._place = _place
    cuda.current_stream = lambda ordinal: gpu().stream
    cuda.tensor_over = _tensor_over
    gpu_handle.join_stream = _join


def gpu() -> Gpu:
    """This rank's, whose one stream is torch's current one."""
    global _gpu
    if _gpu is None:
        _gpu = Gpu(hvd.rank())
    return _gpu


def _place(device: torch.device) -> tuple[int, int]:
    if device.type != "cpu":
        raise TypeError(f"tensors on device {device} cannot be sent: CPU and CUDA only")
    return cuda.place(torch.device("cuda", gpu().device))


def _join(handles: Sequence[int], stream: int) -> None:
    _join_stream(handles, stream)
    gpu().synchronize(stream)


def _tensor_over(memory: CudaArray, like: Tensor) -> Tensor:
    if 0 in memory.shape:
        return torch.empty(memory.shape, dtype=like.dtype)
    raw: Any = np.empty(memory.bytes().shape, np.uint8)
    raw[:] = gpu().read(memory.bytes())
    return torch.from_numpy(raw).view(like.dtype).view(memory.shape)
