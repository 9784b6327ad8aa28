# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie in memory of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["has_own_memory", "is_left_alone", "overlap", "twins_text"]

_users: Callable[[int], int] = torch._C._storage_Use_Count
_ALONE = 2  # users of a storage: one tensor, and the object that asks


def has_own_memory(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor alone uses it.

    Where gradients pass through views only, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share their memory.
    """
    return _users(storage._cdata) == _ALONE


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors have elements in the same place."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    begin, end = one.data_ptr(), other.data_ptr()
    return begin < end + other.nbytes and end < begin + one.nbytes


def is_left_alone(
    sent: tuple[Tensor, int], others: Iterable[tuple[Tensor | None, int | None]]
) -> bool:
    """Whether only autograd has written to a tensor since it had this version.

    Views of one flat buffer have one version in common, so later gradients among `others`, with
    their versions when they were sent, account for more.
    """
    tensor, version = sent
    base = _base_of(tensor)
    versions = [v for x, v in others if x is not None and v is not None and _base_of(x) is base]
    return max([version, *versions]) == tensor._version


def twins_text(one: str, other: str) -> str:
    """Of the error where two parameters have one gradient."""
    return (
        f"{one} and {other} have their gradients in the same memory; give each parameter a .grad "
        "of its own"
    )


def _base_of(x: Tensor) -> Tensor:
    return x if x._base is None else x._base
