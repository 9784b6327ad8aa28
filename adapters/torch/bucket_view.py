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

    def __init__(self, over: Callable[[], Tensor], like: Tensor, at: tuple[int, int]) -> None:
        """`over` makes a uint8 tensor over the memory, which is for gradients of `like`; `at`:
        Buffer.place."""
        self._over = over
        self._form = like.dtype, like.shape
        self.at = at
        self._make()

    def _make(self) -> None:
        dtype, shape = self._form
        self.tensor = self._over().view(dtype).view(shape)
        self.pointer = self.tensor.data_ptr()

    def holds(self, grad: Tensor) -> bool:
        """Whether `grad` is in this memory already."""
        return grad is self.tensor and grad.data_ptr() == self.pointer

    def fits(self, grad: Tensor) -> bool:
        """Whether the result of `grad` can be stored here."""
        same = (grad.dtype, grad.shape) == self._form
        return same and grad.layout is torch.strided and grad.device == self.tensor.device

    def ready(self) -> Tensor:
        """The tensor over this memory, for a result that fits."""
        if self.tensor.data_ptr() != self.pointer:  # the user has set its .data
            self._make()
        return self.tensor


def lay_out(gradients: Iterable[Gradient], process_set: int) -> None:
    """Allocates memory for the gradients of dense, contiguous parameters, dtype by dtype; not for
    those whose gradients have a different dtype.

    In reverse order, as a backward pass makes them, so that neighbours are reduced
    together. Raises LibraryError where memory is short.
    """
    buckets: defaultdict[tuple[int, torch.dtype], list[Gradient]] = defaultdict(list)
    for gradient in gradients:
        gradient.encoding.use_view(None)
        p = gradient.parameter
        usual = p.is_contiguous() and dtype_of_gradient(p) is p.dtype
        if p.device.type in ("cpu", "cuda") and usual and p.numel() > 0:
            device, _ = kind.device_and_stream(p.device)
            buckets[device, p.dtype].insert(0, gradient)
    for (device, _), members in buckets.items():
        starts, total = _starts(members, _ON_CPU if device < 0 else _IN_WINDOW)
        window = Window(process_set, device, total) if device >= 0 else None
        memory: Any = arena.allocate(total) if device < 0 else None
        for gradient, (start, end) in zip(members, starts, strict=True):
            p, at, over = gradient.parameter, NOWHERE, partial(_of_arena, memory, start, end)
            if window is not None:
                over, at = partial(_of_window, window, p, start, end), (window.number, start)
            gradient.encoding.use_view(BucketView(over, p, at))


def _starts(members: list[Gradient], alignment: int) -> tuple[list[tuple[int, int]], int]:
    """The start and end of each gradient, in bytes, and the end of all."""
    places, start = [], 0
    for gradient in members:
        size = gradient.parameter.numel() * gradient.parameter.element_size()
        places.append((start, start + size))
        start += -(-size // alignment) * alignment
    return places, start


def _of_arena(memory: np.ndarray[Any, np.dtype[np.uint8]], start: int, end: int) -> Tensor:
    return torch.from_numpy(memory[start:end])


def _of_window(window: Window, like: Tensor, start: int, end: int) -> Tensor:
    _, stream = kind.device_and_stream(like.device)
    return cuda.bytes_over(window.part(start, end - start, stream))
