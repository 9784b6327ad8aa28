# SPDX-License-Identifier: Apache-2.0
"""torch's rules for gradients and optimizer state.

They concern strides, on which fused kernels rely, dtypes, and which tensors may be written. No
other module knows these rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farandole.errors import PeerError


def of_state(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides of zeros_like(parameter), which torch's optimizers give their state."""
    if _is_dense(parameter):
        return parameter.stride()
    form = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
    return torch.empty_like(form).stride()


def of_gradient(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd gives to a gradient.

    They are the parameter's strides, or contiguous strides if the parameter has gaps or elements
    that share memory.
    """
    if _is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def dtype_of_gradient(parameter: Tensor) -> torch.dtype | None:
    """Returns the dtype of the gradient, or None if the user allows any dtype (torch >= 2.10)."""
    return getattr(parameter, "grad_dtype", parameter.dtype)


def like_gradient(parameter: Tensor) -> Tensor:
    """Returns a tensor with the gradient's shape, dtype and device.

    All elements of the tensor have the same address.
    """
    dtype = dtype_of_gradient(parameter) or parameter.dtype
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns `x` if it has these strides, else a copy with these strides."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def check_apart(x: Tensor) -> None:
    """Raises ValueError if elements of `x` share memory, because no result can be written there."""
    if overlaps(x):
        raise ValueError(
            f"elements of a tensor of shape {tuple(x.shape)} with strides {x.stride()} share "
            "memory, as after expand(), so no result can be written there: use x.contiguous() "
            "instead"
        )


def overlaps(x: Tensor) -> bool:
    """Returns True if elements of `x` share memory."""
    if x.is_contiguous():
        return False
    steps, end = _steps(x), 0  # `end` is the largest offset that smaller strides reach
    for step, n in steps:
        if step <= end:
            break
        end += step * (n - 1)
    else:
        return False
    if steps[0][0] == 0:
        return True
    span = 1 + sum(step * (n - 1) for step, n in steps)
    written = torch.zeros(span, dtype=torch.bool, device="cpu")  # not the user's default device
    written.as_strided(x.shape, x.stride()).fill_(True)
    return int(written.sum()) < x.numel()


def _is_dense(x: Tensor) -> bool:
    expected = 1
    for step, n in () if x.is_contiguous() else _steps(x):
        if step != expected:
            return False
        expected *= n
    return True


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Returns stride and size of each dimension that is longer than 1, sorted by stride."""
    return sorted((step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n != 1)


def sparse_sum(indices: Tensor, values: Tensor, shape: torch.Size, name: str | None) -> Tensor:
    """Returns the coalesced sum of the gathered elements of the tensor `name`.

    Raises PeerError if an index is outside of `shape`. An index may have been damaged in transit,
    and torch would write to whatever address the index gives.
    """
    try:
        made = torch.sparse_coo_tensor(
            indices, values, shape, device=values.device, check_invariants=True
        )
        return made.coalesce()
    except RuntimeError as reason:
        raise PeerError(
            f"{name}: an element's index is outside of the shape {tuple(shape)}: a rank has sent a "
            "tensor with such an index, or its bytes were damaged on the way; remedy: check the "
            "tensor with torch.sparse.check_sparse_tensor_invariants, then the network"
        ) from reason
