# SPDX-License-Identifier: Apache-2.0
"""Small torch problems with a known answer, for the tests of the torch adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.gradients import weight

ROWS = 6  # of each rank's batch

# ---- one number per gradient


def value(rank: int, k: int = 0) -> float:
    """Of all elements of one gradient; averages over 1 to 4 ranks are exact."""
    return 12.0 * (1 + rank) * (1 + 10 * k)


def push(p: Tensor, k: int = 0) -> None:
    """A backward pass that adds value(own rank, k) to p.grad."""
    push_each((p, k))


def push_each(*pairs: tuple[Tensor, int]) -> None:
    """One backward pass that adds value(own rank, k) to p.grad for each pair of p and k."""
    loss: Any = sum((p * value(hvd.rank(), k)).sum() for p, k in pairs)
    loss.backward()


def total(op: Any, ks: Iterable[int], ranks: Sequence[int] | None = None) -> float:
    """The reduced gradient after passes `ks` on `ranks` (all by default)."""
    members = range(hvd.size()) if ranks is None else ranks
    s = sum(value(rank, k) for k in ks for rank in members)
    return s / hvd.size() if op is hvd.Average else s


def toys(count: int = 1, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """`count` parameters of four zeros and their optimizer, lr 1."""
    ps = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
    return ps, hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **options)


def grad_is(p: Tensor, expected: float | None) -> None:
    """Checks a parameter of toys()."""
    if expected is None:
        assert p.grad is None
    else:
        assert p.grad is not None
        assert p.grad.tolist() == [expected] * 4


# ---- a net, compared with one process on the joined batch


def batch(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """(ROWS, 5) and (ROWS, 1) float64 of a rank."""
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() + rank


def joined(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """All ranks' batches in one."""
    parts = [batch(rank, step, part) for rank in range(hvd.size())]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def network() -> nn.Sequential:
    """The same on every call."""
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    return layers.to(torch.float64)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """What tests train with that have no other wish."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pair(
    make: Callable[[Any], torch.optim.Optimizer] = momentum,
    model: Callable[[], nn.Module] = network,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """A model that all ranks train and its optimizer, and both again for this rank alone."""
    own, reference = model(), model()
    optimizer = hvd.DistributedOptimizer(make(own.parameters()), own.named_parameters(), **options)
    return own, optimizer, reference, make(reference.parameters())


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over the batch."""
    return nn.functional.mse_loss(model(data[0]), data[1])


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    alone: bool = False,
    part: int = 0,
    clip: float = 0.0,
    passes: int = 1,
) -> None:
    """On this rank's batches; `alone`: on all ranks' in one. `clip`: gradients to this norm."""
    for step in steps:
        optimizer.zero_grad()
        for each in range(part, part + passes):
            data = joined(step, each) if alone else batch(hvd.rank(), step, each)
            loss: Any = loss_of(model, data)
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def train_both(
    model: nn.Module, optimizer: Any, reference: nn.Module, plain: Any, steps: range, **how: Any
) -> None:
    """All ranks train the model, and this one alone the reference; they are the same after each
    step."""
    for step in steps:
        train(model, optimizer, range(step, step + 1), **how)
        train(reference, plain, range(step, step + 1), alone=True, **how)
        assert_same(model, reference)


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    """Equal parameters, to rounding."""
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


# ---- one tensor that differs by rank


def own(rank: int | None = None, shape: tuple[int, ...] = (4, 3)) -> Tensor:
    """(i * (1 + rank) + rank) for element i, float64; of this rank by default."""
    rank = hvd.rank() if rank is None else rank
    n = int(torch.tensor(shape).prod())
    return torch.arange(n, dtype=torch.float64).reshape(shape) * (1 + rank) + rank


def everyone(shape: tuple[int, ...] = (4, 3)) -> Tensor:
    """All ranks' `own`, stacked."""
    return torch.stack([own(rank, shape) for rank in range(hvd.size())])


# ---- rows


def leaf(rows: int) -> Tensor:
    """Three equal columns, which differ by row and rank."""
    column = torch.arange(float(rows)) + 100 * hvd.rank()
    return column.repeat(3, 1).t().contiguous().requires_grad_()


def gradient_of(x: Tensor, y: Tensor) -> list[float]:
    """By row of the leaf x: the gradient of the sum of y's weighted rows (harness.gradients)."""
    weights = [weight(hvd.rank(), row) for row in range(len(y))]
    (y * torch.tensor(weights)[:, None]).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert x.grad[:, 0].equal(x.grad[:, 2])
    return x.grad[:, 0].tolist()
