# SPDX-License-Identifier: Apache-2.0
"""Nets of real size whose steps take well below a second on one core, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A net, and batches that rank and step determine."""

    name: str
    unit: str  # what is counted per second
    per_batch: int
    net: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  # inputs, targets

    def data(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        return self.batch(torch.Generator().manual_seed(1_000_003 * rank + step))

    def loss(self, net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten())


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions plus a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(classes: int = 100) -> nn.Module:
    """ResNet-18 for small images: 11.2 million parameters in 62 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """A small causal language model: 4.2 million parameters in 52 tensors."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.words(x) + self.places, self.mask, is_causal=True)
        found: Tensor = self.head(hidden)
        return found


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn((4, 3, 16, 16), generator=generator)
    return x, torch.randint(100, (4,), generator=generator)


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(2000, (4, 65), generator=generator)
    return words[:, :-1], words[:, 1:]


TASKS = (
    Task("ResNet-18, 16x16 images", "images", 4, resnet18, _images),
    Task("transformer, 64 tokens", "tokens", 4 * 64, lambda: Transformer(2000, 256, 4, 64), _text),
)


def wide(width: int, layers: int, batch: int) -> Task:
    """Square layers: a step does little else than communicate and update."""

    def net() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, width, generator=generator)
        return x, torch.randint(width, (batch,), generator=generator)

    return Task("wide layers", "rows", batch, net, rows)
