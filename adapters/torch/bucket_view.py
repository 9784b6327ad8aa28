# SPDX-License-Identifier: Apache-2.0
"""Memory for the option gradient_as_bucket_view.

With this option, CPU gradients lie side by side in memory that all ranks of a host map. They are
reduced there without a copy. The Reducer allocates the memory, and Gradient objects use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.arrays import arena
from farandole.torch.strides import dtype_of_gradient

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

_ALIGNMENT = 64  # in bytes, so that each gradient starts at a cache line


class BucketView:
    """The memory of one parameter's gradient.

    The attribute `tensor` is not a view in torch's sense. A view's version would change with each
    write to a neighbouring gradient, and the view's pickle would contain the whole bucket.
    """

    __slots__ = ("_form", "_over", "pointer", "tensor")

    def __init__(self, over: Callable[[], Tensor], like: Tensor) -> None:
        """`over` is a function that wraps the memory in a uint8 tensor. `like` is the parameter."""
        self._over = over
        self._form = like.dtype, like.shape
        self._make()

    def _make(self) -> None:
        dtype, shape = self._form
        self.tensor = self._over().view(dtype).view(shape)
        self.pointer = self.tensor.data_ptr()

    def holds(self, grad: Tensor) -> bool:
        """Returns True if `grad` is this object's tensor and still lies in this memory."""
        return grad is self.tensor and grad.data_ptr() == self.pointer

    def fits(self, grad: Tensor) -> bool:
        """Returns True if a tensor such as `grad` can be stored in this memory."""
        same = (grad.dtype, grad.shape) == self._form
        return same and grad.layout is torch.strided and grad.device == self.tensor.device

    def ready(self) -> Tensor:
        """Returns the tensor that uses this memory.

        If the user has set the tensor's .data, makes a new tensor first.
        """
        if self.tensor.data_ptr() != self.pointer:
            self._make()
        return self.tensor


def lay_out(gradients: Iterable[Gradient]) -> None:
    """Allocates memory for the gradients of contiguous CPU parameters, one block per dtype.

    Skips parameters whose gradients have a different dtype. Gradients lie in reverse order, which
    is the order of a backward pass, so that neighbours are reduced together. Raises LibraryError if
    memory is short.
    """
    buckets: defaultdict[torch.dtype, list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        gradient.encoding.use_view(None)
        p = gradient.parameter
        usual = p.is_contiguous() and dtype_of_gradient(p) is p.dtype
        if p.device.type == "cpu" and usual and p.numel() > 0:
            buckets[p.dtype].insert(0, gradient)
    for members in buckets.values():
        starts, total = _starts(members)
        memory = arena.allocate(total)
        for gradient, (start, end) in zip(members, starts, strict=True):
            over = partial(torch.from_numpy, memory[start:end])
            gradient.encoding.use_view(BucketView(over, gradient.parameter))


def _starts(members: list[Gradient]) -> tuple[list[tuple[int, int]], int]:
    """Returns the start and end of each gradient, and the end of the block, all in bytes."""
    places, start = [], 0
    for gradient in members:
        size = gradient.parameter.numel() * gradient.parameter.element_size()
        places.append((start, start + size))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, start
