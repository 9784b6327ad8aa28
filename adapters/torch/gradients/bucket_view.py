# SPDX-License-Identifier: Apache-2.0
"""gradient_as_bucket_view: gradients side by side in memory where they are reduced without copies.
For the Reducer when it is made, and for each Gradient, on its threads.

On the CPU it is memory that all ranks of a host map, on a GPU a window registered with NCCL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from farandole.arrays import arena
from farandole.arrays.buffers import NOWHERE
from farandole.arrays.window import Window
from farandole.torch import cuda, kind
from farandole.torch.strides import dtype_of_gradient

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient

_ON_CPU = 64  # bytes: gradients begin at cache lines
_IN_WINDOW = 16  # neighbours, padded to multiples of this, are reduced by one NCCL call


class BucketView:
    """The memory of one parameter's gradient.

    Its tensor is not a view in torch's sense: a view of a shared base would change its version
    whenever a neighbour is written, and its pickle would contain the whole bucket.
    """

    __slots__ = ("_form", "_over", "at", "pointer", "tensor")

    def __init__(
        self, over: Callable[[Tensor], Tensor], like: Tensor, at: tuple[int, int] = NOWHERE
    ) -> None:
        """`over` makes a tensor of `like`'s dtype and shape over the memory; `at`: Buffer.place."""
        self._over = over
        self._form = like.dtype, like.shape
        self.at = at
        self._make(like)

    def _make(self, like: Tensor) -> None:
        self.tensor = self._over(like)
        self.pointer = self.tensor.data_ptr()

    def holds(self, grad: Tensor) -> bool:
        """Whether `grad` is in this memory already."""
        return grad is self.tensor and grad.data_ptr() == self.pointer

    def fits(self, grad: Tensor) -> bool:
        """Whether the result of `grad` can be stored here."""
        same = (grad.dtype, grad.shape) == self._form
        return same and grad.layout is torch.strided and grad.device == self.tensor.device

    def ready(self, grad: Tensor) -> Tensor:
        """The tensor over this memory, for the result of `grad`."""
        if self.tensor.data_ptr() != self.pointer:  # the user has set its .data
            self._make(grad)
        return self.tensor


def lay_out(gradients: Iterable[Gradient], process_set: int) -> None:
    """Allocates memory for the gradients of dense, contiguous parameters, dtype by dtype; not for
    those whose gradients have a different dtype.

    In reverse order, as a backward pass makes them, so that neighbours are reduced
    together. Raises LibraryError where memory is short.
    """
    buckets: defaultdict[tuple[int, torch.dtype], list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        gradient.use_view(None)
        p = gradient.parameter
        usual = p.is_contiguous() and dtype_of_gradient(p) is p.dtype
        if p.device.type in ("cpu", "cuda") and usual and p.numel() > 0:
            device, _ = kind.device_and_stream(p.device)
            buckets[device, p.dtype].insert(0, gradient)
    for (device, _), members in buckets.items():
        if device < 0:
            _lay_out_on_cpu(members)
        else:
            _lay_out_on_gpu(members, process_set, device)


def _lay_out_on_cpu(members: list[Gradient]) -> None:
    starts, total = _starts(members, _ON_CPU)
    memory = arena.allocate(total)
    for gradient, (start, end) in zip(members, starts, strict=True):
        gradient.use_view(BucketView(partial(_over_bytes, memory[start:end]), gradient.parameter))


def _lay_out_on_gpu(members: list[Gradient], process_set: int, device: int) -> None:
    starts, total = _starts(members, _IN_WINDOW)
    window = Window(process_set, device, total)
    for gradient, (start, end) in zip(members, starts, strict=True):
        over = partial(_over_window, window, start, end - start)
        gradient.use_view(BucketView(over, gradient.parameter, (window.number, start)))


def _starts(members: list[Gradient], alignment: int) -> tuple[list[tuple[int, int]], int]:
    """The start and end of each gradient, in bytes, and the end of all."""
    places, start = [], 0
    for gradient in members:
        size = gradient.parameter.numel() * gradient.parameter.element_size()
        places.append((start, start + size))
        start += -(-size // alignment) * alignment
    return places, start


def _over_bytes(memory: np.ndarray[Any, np.dtype[np.uint8]], like: Tensor) -> Tensor:
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)


def _over_window(window: Window, start: int, nbytes: int, like: Tensor) -> Tensor:
    _, stream = kind.device_and_stream(like.device)
    memory = cuda.bytes_over(window.part(start, nbytes, stream))
    return memory.view(like.dtype).view(like.shape)
