# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs: finds torch's current stream and tells torch's allocator when to reuse memory.

All functions use the calling thread's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.arrays.cuda_array import CudaArray
from farandole.calls import gpu_handle
from farandole.config import setting
from farandole.errors import warn

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

device = -1  # the GPU of this rank's first GPU tensor; -1 before there is one
_warned = False


def place(where: torch.device) -> tuple[int, int]:
    """Returns CUDA's number of a device, and the caller's current stream on that device."""
    global device
    if device < 0:
        device = where.index
        warn_of_nccl()
    return where.index, current_stream(where.index)


def current_stream(ordinal: int) -> int:
    """Returns CUDA's handle of the caller's current stream on a device."""
    stream: int = torch._C._cuda_getCurrentRawStream(ordinal)
    return stream


def join(handles: Sequence[int], gradients: Iterable[Gradient]) -> None:
    """Makes the caller's stream wait for launched calls. Afterwards, their memory may be released.

    torch's allocator reuses freed memory in the order of the stream that allocated it. Autograd
    ensures that a gradient is sent in that stream. If the caller's stream is a different one, the
    caller's stream uses the memory as well, and record_stream() must tell this to the allocator.
    """
    stream = current_stream(device)
    gpu_handle.join_stream(handles, stream)
    for gradient in gradients:
        if gradient.encoding.stream != stream:
            for x in (gradient.encoded, gradient.grad):
                if x is not None and x.is_cuda:
                    x.record_stream(torch.cuda.current_stream(x.device))


def tensor_over(memory: CudaArray, like: Tensor) -> Tensor:
    """Wraps a result's memory in a tensor with the dtype of `like`, without copying.

    The tensor keeps the memory alive.
    """
    if 0 in memory.shape:
        return torch.empty(memory.shape, dtype=like.dtype, device=like.device)
    return bytes_over(memory.bytes()).view(like.dtype).view(memory.shape)


def bytes_over(memory: CudaArray) -> Tensor:
    """Wraps a result's memory in a tensor of bytes, because DLPack lacks some dtypes."""
    raw: Tensor = torch.utils.dlpack.from_dlpack(memory)
    return raw


def warn_of_nccl() -> None:
    """Warns once if torch.distributed uses NCCL in this process as well.

    All NCCL launches of a process must happen in the same order on all ranks.
    """
    global _warned
    distributed = torch.distributed
    if _warned or not distributed.is_available() or not distributed.is_initialized():
        return
    if "nccl" not in str(distributed.get_backend_config()):
        return
    _warned = True
    if setting("FARANDOLE_GPU_ORDER") == "program":
        return
    warn(
        "torch.distributed also uses NCCL in this process: if its calls overlap with farandole's, "
        "ranks may launch them in different orders and wait for each other forever; set "
        "FARANDOLE_GPU_ORDER=program on all ranks",
        RuntimeWarning,
    )
