# SPDX-License-Identifier: Apache-2.0
"""A small torch problem on a card: ranks that train it together learn what one rank does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import farandole.torch as hvd

__all__ = ["FEATURES", "assert_same", "joined", "network", "own_batch", "reference", "sgd", "train"]

ROWS, FEATURES = 8, 32

Data = Callable[[int], tuple[Tensor, Tensor]]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """(ROWS, FEATURES) and (ROWS, 1) float64 of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x.cuda(), (x.sum(1, keepdim=True).sin() + rank).cuda()


def own_batch(step: int) -> tuple[Tensor, Tensor]:
    """Of this rank."""
    return batch(hvd.rank(), step)


def joined(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' batches in one."""
    parts = [batch(rank, step) for rank in range(hvd.size())]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def network(*layers: nn.Module) -> nn.Sequential:
    """The same on every call."""
    torch.manual_seed(3)
    own = layers or (nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    return nn.Sequential(*own).double().cuda()


def train(
    net: nn.Module, opt: Any, data: Data, steps: int = 5, run: Callable[[Any], Any] = lambda f: f
) -> nn.Module:
    """`run` makes of the net what is called instead, torch.compile for one."""
    forward = run(net)
    for step in range(steps):
        opt.zero_grad()
        x, y = data(step)
        loss: Any = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        opt.step()
    return net


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def reference() -> nn.Module:
    """What one rank learns from all batches."""
    net = network()
    return train(net, sgd(net), joined)


def assert_same(net: nn.Module, other: nn.Module, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Equal parameters, to rounding."""
    for own, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=rtol, atol=atol)
