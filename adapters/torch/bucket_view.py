# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie side by side in memory that all ranks of a host map: nothing copies them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from farandole import arena

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient

__all__ = ["Place", "lay_out"]

_ALIGNMENT = 64  # bytes: gradients begin at cache lines
_warned = False


class Place:
    """The memory of one parameter's gradient.

    Its tensor is no view in torch's sense: one whose base is shared would change its version
    whenever a neighbour is written, and a pickle of it would hold the whole bucket.
    """

    __slots__ = ("_memory", "pointer", "tensor")

    def __init__(self, memory: np.ndarray[Any, np.dtype[np.uint8]], like: Tensor) -> None:
        """`memory`: the bytes of a tensor of `like`'s dtype and shape."""
        self._memory = memory
        self._make(like)

    def _make(self, like: Tensor) -> None:
        self.tensor = torch.from_numpy(self._memory).view(like.dtype).view(like.shape)
        self.pointer = self.tensor.data_ptr()

    def holds(self, grad: Tensor) -> bool:
        """Whether `grad` lies here already."""
        return grad is self.tensor and grad.data_ptr() == self.pointer

    def fits(self, grad: Tensor) -> bool:
        """Whether the result of `grad` may come here."""
        mine = self.tensor
        same = grad.dtype is mine.dtype and grad.shape == mine.shape
        return same and grad.layout is torch.strided and grad.device == mine.device

    def ready(self, grad: Tensor) -> Tensor:
        """The tensor here, for the result of `grad`."""
        if self.tensor.data_ptr() != self.pointer:  # somebody has set its .data
            self._make(grad)
        return self.tensor


def lay_out(gradients: Iterable[Gradient]) -> None:
    """Gives the gradients of dense, contiguous CPU parameters their places, dtype by dtype.

    In reverse order, as they become ready in a backward pass, so that neighbours are reduced
    together. On GPUs they stay where they are, which is said once. Raises LibraryError where memory
    is short.
    """
    buckets: defaultdict[torch.dtype, list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        p = gradient.parameter
        if p.is_cuda:
            _warn_of_copies()
        elif p.device.type == "cpu" and p.is_contiguous() and p.numel() > 0:
            buckets[p.dtype].insert(0, gradient)
    for members in buckets.values():
        _fill_bucket(members)


def _warn_of_copies() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "gradient_as_bucket_view=True: gradients on GPUs have no common memory yet; they are "
            "reduced as without it, with a copy of those up to 1 MiB",
            RuntimeWarning,
            stacklevel=2,
        )


def _fill_bucket(members: list[Gradient]) -> None:
    sizes = [g.parameter.numel() * g.parameter.element_size() for g in members]
    rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = arena.allocate(sum(rooms))
    start = 0
    for gradient, size, room in zip(members, sizes, rooms, strict=True):
        gradient.place = Place(memory[start : start + size], gradient.parameter)
        start += room
