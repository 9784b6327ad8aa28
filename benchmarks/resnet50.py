# SPDX-License-Identifier: Apache-2.0
"""The gradients of ResNet-50: 161 tensors, 25,557,032 float32, without the arithmetic between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
COUNT, ELEMENTS = 161, 25_557_032


def shapes() -> list[Shape]:
    """Parameters in the order of the forward pass, from the architecture of He et al., 2015."""
    found = list(_resnet50())
    assert len(found) == COUNT
    assert sum(torch.Size(s).numel() for s in found) == ELEMENTS
    return found


def _resnet50() -> Iterator[Shape]:
    yield from _convolution(3, 64, 7)
    channels = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(channels, planes, 1)
            yield from _convolution(planes, planes, 3)
            yield from _convolution(planes, 4 * planes, 1)
            if block == 0:  # the shortcut changes the number of channels
                yield from _convolution(channels, 4 * planes, 1)
            channels = 4 * planes
    yield from ((1000, channels), (1000,))


def _convolution(inputs: int, outputs: int, width: int) -> Iterator[Shape]:
    """Weights, and scale and shift of the normalisation after it."""
    yield from ((outputs, inputs, width, width), (outputs,), (outputs,))


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None


class Chain(torch.nn.Module):
    """Parameters whose given gradients arrive one by one in backward(), the last one first."""

    def __init__(self, shapes: Sequence[Shape], rank: int, device: str = "cpu") -> None:
        super().__init__()
        zeros = [torch.zeros(shape, device=device) for shape in shapes]
        self.weights = torch.nn.ParameterList(zeros)
        self.data = Data(shapes, rank, device)
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def forward(self, x: Tensor) -> Tensor:
        link: Callable[..., Tensor] = _Link.apply
        for weight, gradient in zip(self.weights, self.data.own, strict=True):
            x = link(x, weight, gradient)
        return x

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def wrong(self, ranks: Sequence[int]) -> int:
        """Number of gradients that are missing, or not the average over these ranks."""
        found = [weight.grad for weight in self.weights if weight.grad is not None]
        return len(self.weights) - len(found) + self.data.wrong(found, ranks, divisor=len(ranks))


class Data:
    """A rank's tensors of small whole numbers, which follow from rank, tensor and index."""

    def __init__(self, shapes: Sequence[Shape], rank: int, device: str = "cpu") -> None:
        self._device = device
        self._shapes = [torch.Size(shape) for shape in shapes]
        self._sums: dict[tuple[int, ...], list[Tensor]] = {}
        self.own = self._values(rank)

    def _values(self, rank: int) -> list[Tensor]:
        most = max(shape.numel() for shape in self._shapes)
        row = ((torch.arange(most + 13, device=self._device) + 5 * rank) % 13 + 1).float()
        return [
            row[i % 13 : i % 13 + shape.numel()].clone().reshape(shape)
            for i, shape in enumerate(self._shapes)
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        for x, own in zip(tensors, self.own, strict=True):
            x.copy_(own)

    def wrong(self, tensors: Sequence[Tensor], ranks: Sequence[int], divisor: int = 1) -> int:
        """Number of tensors that are not the sum over these ranks, divided by `divisor`."""
        key = (*ranks, divisor)
        if key not in self._sums:
            parts = [self._values(rank) for rank in ranks]
            self._sums[key] = [sum(xs[1:], xs[0]) / divisor for xs in zip(*parts, strict=True)]
        pairs = zip(tensors, self._sums[key], strict=True)
        return sum(not _alike(x, y) for x, y in pairs)


def _alike(x: Tensor, y: Tensor) -> bool:
    """Tries equal() first: it is much faster, and sums of small numbers are usually exact."""
    return torch.equal(x, y) or torch.allclose(x, y, rtol=1e-6, atol=0)
