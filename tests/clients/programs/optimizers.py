# SPDX-License-Identifier: Apache-2.0
"""Every optimizer of torch and of the packages that are installed, beside one
process on the joined batch. Run in ranks by run.py; not by itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd

PACKAGES = (
    *("torch.optim", "pytorch_optimizer", "torch_optimizer"),
    *("schedulefree", "prodigyopt", "lion_pytorch"),
)
STEPS = 3


def classes() -> Iterator[Any]:
    """All public ones, as parameters."""
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        for name in sorted(dir(module)):
            kind = getattr(module, name)
            if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
                continue
            if kind is not torch.optim.Optimizer and not name.startswith(("_", "Base")):
                yield pytest.param(kind, id=f"{package}.{name}")


def batch(rank: int, step: int) -> Tensor:
    """(4, 6) of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator)


def network() -> nn.Module:
    """The same on every call."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(net: nn.Module, rank: int, step: int) -> None:
    """Adds the gradients of a rank's batch."""
    (net(batch(rank, step)).square().mean() * 10).backward()


def train(net: nn.Module, optimizer: Any, ranks: Sequence[int]) -> list[Tensor]:
    """The parameters after steps with the mean of these ranks' gradients. Not those of one joint
    batch: their rounding differs, which some optimizers (SOAP, Alice) make visible."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for rank in ranks:
            backward(net, rank, step)
        for p in net.parameters():
            if len(ranks) > 1 and p.grad is not None:
                p.grad /= len(ranks)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", list(classes()))
def test_as_one_process_with_all_gradients(kind: Any) -> None:
    twin, net = network(), network()
    try:
        reference = kind(twin.parameters(), lr=0.01)
        expected = train(twin, reference, range(hvd.size()))
    except Exception as reason:
        pytest.skip(f"alone it does not take this: {type(reason).__name__}: {reason}")
    try:
        inner = kind(net.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    except ValueError as reason:
        if kind is torch.optim.LBFGS:
            pytest.skip(str(reason))
        raise
    found = train(net, optimizer, [hvd.rank()])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
