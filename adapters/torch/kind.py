# SPDX-License-Identifier: Apache-2.0
"""Torch tensors as an array kind. Importing this module registers it with the neutral calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farandole.buffers import DTYPES, EMPTY, NOWHERE, Buffer, Kind, Memory, Shape, register
from farandole.cuda_array import CudaArray
from farandole.handles import take
from farandole.requests import Call, PreparedOnGpu, PreparedTensor
from farandole.torch import cuda

__all__ = ["TorchKind", "address_of", "describe", "device_and_stream", "prepare", "receive"]

# Older torch has no uint16, uint32 and uint64: they are absent rows.
_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
_COMPLEX = (torch.complex64, torch.complex128)
# NumPy has no bfloat16, and old torch reads no unsigned types but uint8: viewed as these instead.
_CARRIERS = {
    "bfloat16": np.int16,
    "uint16": np.int16,
    "uint32": np.int32,
    "uint64": np.int64,
}


class TorchKind(Kind):
    """Dense tensors of every dtype the core knows, leaves that require a gradient included."""

    def matches(self, x: Any) -> bool:
        """As in Kind."""
        return isinstance(x, Tensor)

    def describe(self, x: Tensor, in_place: bool = False) -> Buffer:
        """As in Kind."""
        code = _CODES.get(x.dtype)
        if code is None or x.layout is not torch.strided or x.is_meta:
            raise TypeError(_refusal(x))
        owner = x.detach()
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            if in_place:
                raise ValueError(
                    f"a tensor of shape {tuple(x.shape)} with strides {x.stride()} is not "
                    "contiguous: it cannot be changed in place; use the out-of-place call, or "
                    "x.contiguous()"
                )
            owner = owner.resolve_conj().resolve_neg().contiguous()
        pointer = owner.data_ptr() if owner.numel() else EMPTY
        device, stream = device_and_stream(x.device)
        return Buffer(pointer, code, tuple(x.shape), owner, device, stream)

    def address(
        self, x: Tensor, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> int:
        """As in Kind."""
        if x.dtype is not dtype or x.shape != shape or not x.is_contiguous():
            return 0
        if not x.is_cpu if device is None else x.device != device:
            return 0
        if x.is_neg() or (dtype in _COMPLEX and x.is_conj()):
            return 0
        return x.data_ptr() or EMPTY

    def memory(self, x: Tensor, address: Any) -> torch.UntypedStorage:
        """As in Kind: `x.data` may be set to another tensor meanwhile."""
        return x.untyped_storage()

    def empty(self, like: Tensor, shape: Shape | None = None) -> Tensor:
        """As in Kind."""
        return torch.empty(
            like.shape if shape is None else shape, dtype=like.dtype, device=like.device
        )

    def stream(self, x: Tensor) -> int:
        """As in Kind."""
        return device_and_stream(x.device)[1]

    def wrap(self, memory: Memory | CudaArray, like: Tensor) -> Tensor:
        """As in Kind."""
        if isinstance(memory, CudaArray):
            return cuda.tensor_over(memory, like)
        array = np.asarray(memory)
        carrier = _CARRIERS.get(DTYPES[_CODES[like.dtype]])
        if carrier is not None:
            return torch.from_numpy(array.view(carrier)).view(like.dtype)
        return torch.from_numpy(array)


def device_and_stream(device: torch.device) -> tuple[int, int]:
    """The core's device number and the stream on which the caller works."""
    if device.type == "cpu":
        return -1, 0
    if device.type == "cuda":
        return cuda.place(device)
    raise TypeError(f"tensors on device {device} cannot be sent: CPU and CUDA only")


def address_of(x: Tensor) -> int:
    """Where the first element of a dense tensor lies; EMPTY for one without elements."""
    pointer = x.data_ptr()
    if pointer == 0 and x.numel() > 0:
        raise ValueError("the tensor's storage has been freed")
    return pointer or EMPTY


def _refusal(x: Tensor) -> str:
    if x.layout is not torch.strided:
        return (
            f"a tensor of layout {x.layout} cannot be sent as it is: use to_dense(), or "
            "sparse_as_dense=True in DistributedOptimizer"
        )
    if x.is_meta:
        return "a tensor on device meta has no data to send"
    return f"dtype {x.dtype} cannot be sent; supported: {', '.join(DTYPES)}"


_kind = TorchKind()
register(_kind)


def describe(x: Tensor, in_place: bool = False) -> Buffer:
    """The memory of a tensor, or of a contiguous copy of it; errors as in Kind.describe."""
    return _kind.describe(x, in_place)


def prepare(
    call: Call,
    x: Tensor,
    group: tuple[str | None, int],
    in_place: bool,
    place: tuple[int, int] = NOWHERE,
) -> PreparedTensor | PreparedOnGpu:
    """A request for tensors such as `x`, to be submitted again and again.

    `group`: its name on the wire and its number of members; `place`: as in Buffer. Errors as in
    Kind.describe.
    """
    buffer = replace(describe(x, in_place), place=place)
    tensor = PreparedTensor(call, buffer, *group)
    if buffer.device < 0:
        return tensor
    return PreparedOnGpu(tensor, partial(cuda.current_stream, buffer.device))


def receive(handle: int, x: Tensor) -> Tensor:
    """A finished handle's own memory as a tensor such as `x`, which was its input."""
    buffer = describe(x)
    return _kind.wrap(take(handle, buffer, buffer.stream)[0], x)
