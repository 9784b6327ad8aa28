# SPDX-License-Identifier: Apache-2.0
"""Describes torch tensors to the core: memory, dtype and device.

Importing this module registers TorchKind. May be used from any thread.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from farandole.arrays import buffers
from farandole.arrays.buffers import DTYPES, EMPTY, Buffer, ResultMemory
from farandole.arrays.cuda_array import CudaArray
from farandole.arrays.kinds import Kind, Shape, register
from farandole.calls import part
from farandole.calls.handles import take
from farandole.calls.requests import Call, PreparedCall
from farandole.torch import cuda
from farandole.torch.strides import check_apart

# Older versions of torch lack uint16, uint32 and uint64. These dtypes are then left out.
_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
_COMPLEX = frozenset((torch.complex64, torch.complex128))
_NOT_LENT = (0, None)
# Reports an in-place change to autograd. A backward pass that needs the old values then raises.
_count_a_change = torch.autograd.graph.increment_version
# Remedies for tensors that have no memory themselves. Keys are class names, so that the classes
# need not be imported. The first of a tensor's base classes that is in this table counts.
_INSTEAD = {
    "DTensor": "send this rank's part, x.to_local(), or the whole, x.full_tensor()",
    "MaskedTensor": "send x.get_data() and x.get_mask(), or x.to_tensor(value)",
    "AsyncCollectiveTensor": "send x.wait(), which is an ordinary tensor",
    "FakeTensor": "it describes values that nobody has computed: call outside FakeTensorMode",
    "FunctionalTensor": "call outside torch.compile and functionalization",
    "UninitializedTensorMixin": "it has no shape yet: run one batch through the lazy module first",
}


class TorchKind(Kind):
    """Dense tensors of every dtype that the core knows. Leaves may require a gradient."""

    def matches(self, x: Any) -> bool:
        """Returns True if `x` is a torch tensor."""
        return isinstance(x, Tensor)

    def describe(self, x: Tensor, in_place: bool = False) -> Buffer:
        """Returns the memory of `x`, or of a contiguous copy of `x`.

        With `in_place`, tells autograd that `x` changes.
        """
        code, pointer = check(x)  # before any other access to `x`
        owner = x.detach()
        if in_place:
            with suppress(RuntimeError):  # tensors made in torch.inference_mode() have no version
                _count_a_change(x)
        if not x.is_contiguous() or is_lazy(x):
            if in_place:
                check_apart(x)
                raise ValueError(_not_in_place(x))
            owner = in_order(owner)
            pointer = address_of(owner)
        device, stream = device_and_stream(x.device)
        return Buffer(pointer, code, tuple(x.shape), owner, device, stream)

    def lent(
        self, x: Tensor, dtype: Any, shape: Shape, in_place: bool, device: Any = None
    ) -> tuple[int, object]:
        """Returns the address and storage of `x`, if `x` has this form and needs no copy.

        Otherwise, returns (0, None). The caller keeps the storage alive rather than `x`, because
        the user may set `x.data` meanwhile.
        """
        try:
            if x.dtype is not dtype or x.shape != shape or not x.is_contiguous():
                return _NOT_LENT
            if not x.is_cpu if device is None else x.device != device:
                return _NOT_LENT
            if x.is_neg() or (dtype in _COMPLEX and x.is_conj()) or forward_ad._current_level >= 0:
                return _NOT_LENT
            begin, storage = x.storage_offset(), x.untyped_storage()
            if storage.nbytes() < x.nbytes + (begin and begin * x.element_size()):
                return _NOT_LENT
            if in_place:
                _count_a_change(x)
            return x.data_ptr() or address_of(x), storage
        except (RuntimeError, TypeError, ValueError):  # describe() copies `x`, or raises
            return _NOT_LENT

    def empty(self, like: Tensor, shape: Shape | None = None) -> Tensor:
        """Returns a new contiguous tensor with the dtype and device of `like`.

        By default, the tensor also has the shape of `like`.
        """
        return torch.empty(
            like.shape if shape is None else shape, dtype=like.dtype, device=like.device
        )

    def stream(self, x: Tensor) -> int:
        """Returns the current CUDA stream of the tensor's device, or 0 on the CPU."""
        return device_and_stream(x.device)[1]

    def wrap(self, memory: ResultMemory | CudaArray, like: Tensor) -> Tensor:
        """Wraps a result's memory in a tensor with the dtype of `like`, without copying."""
        if isinstance(memory, CudaArray):
            return cuda.tensor_over(memory, like)
        # Converts as bytes, because neither library has all dtypes of the other.
        flat = np.asarray(memory).reshape(-1)
        return torch.from_numpy(flat.view(np.uint8)).view(like.dtype).view(memory.shape)


def device_and_stream(device: torch.device) -> tuple[int, int]:
    """Returns the core's number of a device and the caller's current stream on that device.

    The CPU has the number -1 and the stream 0.
    """
    if device.type == "cpu":
        return -1, 0
    if device.type == "cuda" and torch.version.hip is None:
        return cuda.place(device)
    what = f"device {device}"
    if device.type == "cuda":
        what = f"an AMD GPU ({device} of PyTorch for ROCm {torch.version.hip})"
    raise TypeError(
        f"tensors on {what} cannot be sent: farandole supports CPUs and NVIDIA GPUs; remedy: send "
        "a copy, x.cpu(), or train with DDP over the device's own library (RCCL, XCCL)"
    )


def check(x: Tensor) -> tuple[int, int]:
    """Returns the core's code of a tensor's dtype, and the tensor's address.

    The tensor need not be contiguous. Raises TypeError or ValueError for tensors that no call
    accepts.
    """
    code = _CODES.get(x.dtype)
    if code is None or x.layout is not torch.strided or x.is_meta or x.is_nested:
        raise TypeError(_refusal(x))
    address = address_of(x)
    check_no_tangent(x)
    return code, address


def check_no_tangent(x: Tensor) -> None:
    """Raises TypeError for a dual tensor of forward-mode AD. A call would drop its tangent."""
    # Sparse tensors are never dual tensors.
    if x.layout is not torch.strided or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise TypeError(
            "a tensor with a tangent of forward-mode AD cannot be sent, because collectives are "
            "differentiable in backward passes only: send its primal and its tangent separately, "
            "from torch.autograd.forward_ad.unpack_dual(x); for gradients, leave dual_level() "
            "before backward(), or use no_sync() in it"
        )


def is_lazy(x: Tensor) -> bool:
    """Returns True if `x` is conjugated or negated lazily, so that its memory holds other values.

    resolve_conj().resolve_neg() computes the values. contiguous() might not.
    """
    return x.is_neg() or (x.dtype in _COMPLEX and x.is_conj())


def in_order(x: Tensor) -> Tensor:
    """Returns `x` if its memory holds the values in order, else a copy whose memory does.

    Raises ValueError if an earlier call writes to the memory of `x`.
    """
    if x.is_contiguous() and not is_lazy(x):
        return x
    check_unused(x)
    return x.resolve_conj().resolve_neg().contiguous()


def check_unused(x: Tensor, writes: bool = False) -> None:
    """Raises ValueError if an unfinished earlier call writes to the elements of `x`.

    With `writes`, also raises ValueError if such a call reads them. Call this before you copy `x`.
    Does not check GPU memory.
    """
    if x.layout is torch.sparse_coo:
        check_unused(x._indices(), writes)
        check_unused(x._values(), writes)
    elif x.layout is torch.strided and x.is_cpu and not x.is_nested and x.numel():
        size = x.element_size()
        strides = [size * step for step in x.stride()]
        buffers.check_unused(address_of(x), size, x.shape, strides, writes)


@torch.no_grad()
def store(result: Tensor, x: Tensor) -> None:
    """Copies a call's result to `x`, in inference mode if `x` was made in that mode.

    Raises ValueError if a call that was started meanwhile uses the elements of `x`. The other ranks
    already have their results then, so this error ends this rank's part in the job.
    """
    try:
        check_unused(x, writes=True)
        with torch.inference_mode() if x.is_inference() else nullcontext():
            x.copy_(result)
    except Exception as reason:
        part.end(reason)
        raise


def address_of(x: Tensor) -> int:
    """Returns the address of a dense tensor's first element, or EMPTY if there are no elements.

    Raises TypeError for tensors that have no memory themselves: DTensor and other wrappers, and
    tensors of torch.func's transforms. Raises ValueError if the storage was freed or is smaller
    than the tensor.
    """
    type_ = type(x)
    sees_all = type_.__torch_dispatch__ is not Tensor.__torch_dispatch__  # true for all wrappers
    if sees_all and _instead_of(type_):  # for some of these classes, data_ptr() gives a warning
        raise TypeError(_without_memory(type_))
    try:
        pointer, held = x.data_ptr(), x.untyped_storage().nbytes()
    except (RuntimeError, ValueError) as reason:
        raise TypeError(_without_memory(type_)) from reason
    count = x.numel()
    if count == 0:
        return EMPTY
    if not x.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    needed = (x.storage_offset() + count) * x.element_size()
    if pointer and held >= needed:
        return pointer
    if held >= needed or sees_all:
        raise TypeError(_without_memory(type_))
    raise ValueError(
        f"a tensor of shape {tuple(x.shape)} lies in a storage of {held} bytes and needs {needed}: "
        "the storage was freed or resized (as FSDP does with parameters that are not in use); "
        "restore it first, x.untyped_storage().resize_(...), or send a copy made earlier"
    )


def check_parameter(x: Tensor, name: str) -> None:
    """Raises TypeError, with the name, for a parameter whose gradients could not be reduced.

    The parameter must not be sparse. Its class must have memory itself, because the gradients will
    have the same class. A freed storage is allowed, because parameters are not sent.
    """
    if x.layout is not torch.strided:
        raise TypeError(
            f"parameter {name} has layout {x.layout}, but only dense parameters can be trained: "
            "use x.to_dense(), or freeze it with x.requires_grad_(False)"
        )
    if type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ or x.is_meta:
        return
    with suppress(ValueError):
        try:
            address_of(x)
        except TypeError as reason:
            raise TypeError(f"parameter {name}: {reason}") from reason


def _instead_of(type_: type[Tensor]) -> str | None:
    names = (base.__name__ for base in type_.__mro__)
    return next((_INSTEAD[name] for name in names if name in _INSTEAD), None)


def _without_memory(type_: type[Tensor]) -> str:
    instead = _instead_of(type_)
    if instead is None and type_.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        instead = "it wraps other tensors: send those, or a plain tensor with their values"
    if instead is None:
        instead = (
            "call outside torch.func's transforms (vmap, grad, functionalize); for a zero tensor "
            "of forward-mode AD, send x.clone()"
        )
    return f"a {type_.__name__} cannot be sent, because it holds no elements itself: {instead}"


def _not_in_place(x: Tensor) -> str:
    if is_lazy(x):
        what = "conjugated (x.is_conj())" if x.is_conj() else "negated (x.is_neg())"
        return (
            f"a tensor of shape {tuple(x.shape)} is a lazily {what} view: it cannot be changed in "
            "place; use the out-of-place call, or reduce y = x.resolve_conj().resolve_neg() and "
            "then x.copy_(y)"
        )
    return (
        f"a tensor of shape {tuple(x.shape)} with strides {x.stride()} is not contiguous: it "
        "cannot be changed in place; use the out-of-place call, or x.contiguous()"
    )


def _refusal(x: Tensor) -> str:
    if x.is_nested:
        return "a nested tensor cannot be sent as it is: send x.values() and x.offsets()"
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
    """Returns the memory of a tensor, or of a contiguous copy. Raises Kind.describe()'s errors."""
    return _kind.describe(x, in_place)


def prepare(call: Call, x: Tensor, in_place: bool) -> PreparedCall:
    """Prepares a call on tensors such as `x`. Raises Kind.describe()'s errors."""
    buffer = describe(x, in_place)
    current = partial(cuda.current_stream, buffer.device) if buffer.device >= 0 else None
    return PreparedCall(call, buffer, current=current)


def receive(handle: int, x: Tensor) -> Tensor:
    """Returns a finished call's result as a tensor like the input `x`, in the core's memory."""
    buffer = describe(x)
    return _kind.wrap(take(handle, buffer, buffer.stream)[0], x)
