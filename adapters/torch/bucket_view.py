# SPDX-License-Identifier: Apache-2.0
"""Gradients that lie side by side in memory in which they are reduced: nothing copies them.

On the CPU that is memory that all ranks of a host map, on a GPU a window that NCCL knows.
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

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient

__all__ = ["Place", "lay_out"]

_ON_CPU = 64  # bytes: gradients begin at cache lines
_IN_WINDOW = 16  # those with nothing but padding to such a multiple between them are one NCCL call


class Place:
    """The memory of one parameter's gradient.

    Its tensor is no view in torch's sense: one whose base is shared would change its version
    whenever a neighbour is written, and a pickle of it would hold the whole bucket.
    """

    __slots__ = ("_form", "_over", "at", "pointer", "tensor")

    def __init__(
        self, over: Callable[[Tensor], Tensor], like: Tensor, at: tuple[int, int] = NOWHERE
    ) -> None:
        """`over` makes a tensor of `like`'s dtype and shape over it; `at`: as in Buffer."""
        self._over = over
        self._form = like.dtype, like.shape
        self.at = at
        self._make(like)

    def _make(self, like: Tensor) -> None:
        self.tensor = self._over(like)
        self.pointer = self.tensor.data_ptr()

    def holds(self, grad: Tensor) -> bool:
        """Whether `grad` lies here already."""
        return grad is self.tensor and grad.data_ptr() == self.pointer

    def fits(self, grad: Tensor) -> bool:
        """Whether the result of `grad` may come here."""
        same = (grad.dtype, grad.shape) == self._form
        return same and grad.layout is torch.strided and grad.device == self.tensor.device

    def ready(self, grad: Tensor) -> Tensor:
        """The tensor here, for the result of `grad`."""
        if self.tensor.data_ptr() != self.pointer:  # somebody has set its .data
            self._make(grad)
        return self.tensor

    def vacate(self, base: Tensor) -> Tensor:
        """`base` where the next reduction leaves it alone: in a window all reduce at one place."""
        return base.clone() if self.at != NOWHERE and base is self.tensor else base


def lay_out(gradients: Iterable[Gradient], process_set: int) -> None:
    """Gives the gradients of dense, contiguous parameters their places, dtype by dtype.

    In reverse order, as they become ready in a backward pass, so that neighbours are reduced
    together. Raises LibraryError where memory is short.
    """
    buckets: defaultdict[tuple[int, torch.dtype], list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        gradient.lie_at(None)
        p = gradient.parameter
        if p.device.type in ("cpu", "cuda") and p.is_contiguous() and p.numel() > 0:
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
        gradient.lie_at(Place(partial(_over_bytes, memory[start:end]), gradient.parameter))


def _lay_out_on_gpu(members: list[Gradient], process_set: int, device: int) -> None:
    starts, total = _starts(members, _IN_WINDOW)
    window = Window(process_set, device, total)
    for gradient, (start, end) in zip(members, starts, strict=True):
        over = partial(_over_window, window, start, end - start)
        gradient.lie_at(Place(over, gradient.parameter, (window.number, start)))


def _starts(members: list[Gradient], alignment: int) -> tuple[list[tuple[int, int]], int]:
    """Where each gradient begins and ends, in bytes, and where all end."""
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
