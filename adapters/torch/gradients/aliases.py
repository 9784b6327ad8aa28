# SPDX-License-Identifier: Apache-2.0
"""Finds gradients that share memory or were written to. Used by Gradient, Arrivals and Reducer, on
autograd's threads and the one that steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

_users: Callable[[int], int] = torch._C._storage_Use_Count
_number_of = attrgetter("_cdata")
_ALONE = 2  # references to a storage that one tensor uses: the tensor's, and the caller's


def has_own_memory(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor alone uses it.

    If gradients pass only through views, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share memory.
    """
    return _users(storage._cdata) == _ALONE


def have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether one tensor alone uses each of them."""
    return set(map(_users, map(_number_of, storages))) <= {_ALONE}


def apart(grad: Tensor) -> Tensor:
    """A gradient that autograd has made, copied if it shares memory."""
    if grad.layout is not torch.strided or has_own_memory(grad.untyped_storage()):
        return grad
    return grad.detach().clone()


def claim(address: int, gradient: Gradient) -> None:
    """Notes memory that its round reduces. Raises RuntimeError for the same memory twice."""
    other = gradient.reducer.round.take(address, gradient)
    if other is not gradient:
        raise RuntimeError(twins_text(gradient.name, other.name))


def complaint_of(gradient: Gradient, sent: Iterable[Gradient]) -> str | None:
    """The error text if a gradient was written to while it was reduced; None if only by autograd.

    `sent`: all gradients of the round. Views of one flat buffer share one version counter, which
    gradients sent later increase too.
    """
    wire, version = gradient.wire, gradient.sent_version
    if wire is None or version is None or wire._version == version:
        return None
    for other in sent:
        if other is gradient or other.wire is None:
            continue
        if _overlap(other.wire, wire):
            return twins_text(gradient.name, other.name)
        if other.sent_version is not None and _base_of(other.wire) is _base_of(wire):
            version = max(version, other.sent_version)
    return None if version == wire._version else spoiled_text(gradient.name, "changed")


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    begin, end = one.data_ptr(), other.data_ptr()
    return begin < end + other.nbytes and end < begin + one.nbytes


def spoiled_text(name: str, what: str) -> str:
    """The error text for a gradient that was changed or replaced while it was reduced."""
    return (
        f"the gradient of {name} was {what} while it was being reduced: use "
        "DistributedOptimizer(..., complete_after_backward=True), or call optimizer.synchronize() "
        "before replacing gradients between backward() and step() (to clip: "
        "optimizer.clip_grad_norm_(); to reset: optimizer.zero_grad())"
    )


def fitted(grad: Tensor | None, parameter: Tensor, name: str) -> tuple[Tensor | None, str | None]:
    """(the gradient in its parameter's present form, None), or (None, error text).

    `model.half()` may have been called after backward().
    """
    if grad is None or grad.shape == parameter.shape:
        return None if grad is None else grad.to(parameter.device, parameter.dtype), None
    return None, (
        f"the gradient of {name} has shape {[*grad.shape]}, and the parameter has become one of "
        f"{[*parameter.shape]}: change a parameter's shape between step() and zero_grad()"
    )


def twins_text(one: str, other: str) -> str:
    """The error text for two parameters with one gradient."""
    return (
        f"{one} and {other} have their gradients in the same memory; give each parameter a .grad "
        "of its own"
    )


def _base_of(x: Tensor) -> Tensor:
    return x if x._base is None else x._base
