# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie in memory of others, or that others have written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient

__all__ = [
    "apart",
    "complaint_of",
    "fitted",
    "has_own_memory",
    "have_own_memory",
    "spoiled_text",
    "twins_text",
]

_users: Callable[[int], int] = torch._C._storage_Use_Count
_number_of = attrgetter("_cdata")
_ALONE = 2  # users of a storage: one tensor, and the object that asks


def has_own_memory(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor alone uses it.

    Where gradients pass through views only, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share their memory.
    """
    return _users(storage._cdata) == _ALONE


def have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether one tensor alone uses each of them."""
    return set(map(_users, map(_number_of, storages))) <= {_ALONE}


def apart(grad: Tensor) -> Tensor:
    """A gradient that autograd has made, in memory of its own."""
    if grad.layout is not torch.strided or has_own_memory(grad.untyped_storage()):
        return grad
    return grad.detach().clone()


def complaint_of(gradient: Gradient, sent: Iterable[Gradient]) -> str | None:
    """What to say where somebody wrote to a gradient on its way; None: nobody but autograd did.

    `sent`: all in the round. Views of one flat buffer have one version in common, so gradients
    that were sent later account for more.
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
    """Of the error where a gradient was changed or replaced on its way."""
    return (
        f"the gradient of {name} was {what} while it was being reduced: call "
        "optimizer.synchronize() before replacing gradients between backward() and step() (to "
        "clip: optimizer.clip_grad_norm_(); to reset: optimizer.zero_grad())"
    )


def fitted(grad: Tensor | None, parameter: Tensor, name: str) -> tuple[Tensor | None, str | None]:
    """The gradient as its parameter needs it by now, or None and the text of an error.

    `model.half()` may have come after backward().
    """
    if grad is None or grad.shape == parameter.shape:
        return None if grad is None else grad.to(parameter.device, parameter.dtype), None
    return None, (
        f"the gradient of {name} has shape {[*grad.shape]}, and the parameter has become one of "
        f"{[*parameter.shape]}: change a parameter's shape between step() and zero_grad()"
    )


def twins_text(one: str, other: str) -> str:
    """Of the error where two parameters have one gradient."""
    return (
        f"{one} and {other} have their gradients in the same memory; give each parameter a .grad "
        "of its own"
    )


def _base_of(x: Tensor) -> Tensor:
    return x if x._base is None else x._base
