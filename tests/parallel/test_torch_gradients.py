# SPDX-License-Identifier: Apache-2.0
"""Gradients of the synchronous calls: those that Horovod's users rely on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import farandole.torch as hvd
from harness.toys import own


def scaled(x: Tensor) -> Tensor:
    """A loss whose gradients differ by element and by rank."""
    weights = torch.arange(x.numel(), dtype=x.dtype).view_as(x) + 10 * (1 + hvd.rank())
    return (x * weights).sum()


def weights_of(rank: int, shape: tuple[int, ...]) -> Tensor:
    n = int(torch.tensor(shape).prod())
    return torch.arange(n, dtype=torch.float64).view(shape) + 10.0 * (1 + rank)


def gradient_of(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    scaled(call(leaf)).backward()
    assert leaf.grad is not None
    return leaf.grad


def mean_weights(shape: tuple[int, ...]) -> Tensor:
    return torch.stack([weights_of(r, shape) for r in range(hvd.size())]).mean(0)


@pytest.mark.parametrize("name", [None, "named"])
def test_gradient_of_allreduce(name: str | None) -> None:
    shape = (4, 3)
    mean = mean_weights(shape)
    assert torch.equal(gradient_of(lambda x: hvd.allreduce(x, name=name), own()), mean)
    g = gradient_of(
        lambda x: hvd.allreduce(x, name=name, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4),
        own(),
    )
    torch.testing.assert_close(g, mean * hvd.size() * 2)
    a, b = (own().requires_grad_() for _ in range(2))
    ya, yb = hvd.grouped_allreduce([a, b], name=name)
    (scaled(ya) + 2 * scaled(yb)).backward()
    assert a.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(b.grad, 2 * a.grad)
    torch.testing.assert_close(a.grad, mean)
    with pytest.raises(NotImplementedError, match="Average and Sum only"):
        gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), own())


def test_gradient_of_allgather() -> None:
    n, rank = hvd.size(), hvd.rank()
    rows = [r + 1 for r in range(n)]
    g = gradient_of(hvd.allgather, own(shape=(rank + 1, 2)))
    begin = sum(rows[:rank])
    assert torch.equal(g, mean_weights((sum(rows), 2))[begin : begin + rank + 1])


def test_gradient_of_broadcast() -> None:
    root = hvd.size() - 1
    g = gradient_of(lambda x: hvd.broadcast(x, root), own())
    expected = mean_weights((4, 3)) if hvd.rank() == root else torch.zeros(4, 3)
    assert torch.equal(g, expected.double())


def test_gradient_of_alltoall() -> None:
    n, rank = hvd.size(), hvd.rank()
    splits = [r + 1 for r in range(n)]  # member r gets r + 1 rows, the last row stays unsent
    x = own(shape=(sum(splits) + 1, 1))
    g = gradient_of(lambda t: hvd.alltoall(t, splits)[0], x)
    parts = [
        weights_of(r, (n * (r + 1), 1))[rank * (r + 1) : (rank + 1) * (r + 1)] for r in range(n)
    ]
    assert torch.equal(g, torch.cat([*parts, torch.zeros(1, 1)]))
    g = gradient_of(hvd.alltoall, own(shape=(n, 1)))
    assert torch.equal(g, torch.stack([weights_of(r, (n, 1))[rank] for r in range(n)]))


def test_gradient_of_reducescatter() -> None:
    n = hvd.size()
    rows = [2] + [1] * (n - 1)
    gathered = torch.cat([weights_of(r, (rows[r], 2)) for r in range(n)])
    x = own(shape=(n + 1, 2))
    assert torch.equal(gradient_of(hvd.reducescatter, x), gathered)
    assert torch.equal(gradient_of(lambda t: hvd.reducescatter(t, op=hvd.Sum), x), gathered * n)
    factors = {"prescale_factor": 0.5, "postscale_factor": 8.0}
    assert torch.equal(gradient_of(lambda t: hvd.reducescatter(t, **factors), x), gathered * 4)
    for op in (hvd.Max, hvd.Min, hvd.Product):
        with pytest.raises(NotImplementedError, match="reducescatter is differentiable for"):
            gradient_of(lambda t, op=op: hvd.reducescatter(t, op=op), x)


def test_gradcheck() -> None:
    """Ranks take the same small steps, and the average over them has a true gradient."""
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: hvd.allreduce(t.sin()), (x,))
    assert torch.autograd.gradgradcheck(lambda t: hvd.allreduce(t.sin()), (x,))


def test_second_derivatives() -> None:
    x = own(0).requires_grad_()
    factor = 1.0 + hvd.rank()
    mean = (hvd.size() + 1) / 2  # of the factors
    y = hvd.allreduce(x * factor).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    torch.testing.assert_close(g, 2 * mean * factor * x)
    (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(h, torch.full_like(x, 2 * mean * factor))


def test_second_derivatives_of_broadcast() -> None:
    root, mean = hvd.size() - 1, (hvd.size() + 1) / 2  # mean of the losses' factors
    x = own(0).requires_grad_()
    y = (hvd.broadcast(x, root) ** 3).sum() * (1.0 + hvd.rank())
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    ours = float(hvd.rank() == root)
    torch.testing.assert_close(g, ours * 3 * mean * x**2)
    torch.testing.assert_close(h, ours * 6 * mean * x / hvd.size())  # only the root's g has a slope


def test_gradients_of_long_chains_in_any_order() -> None:
    x = own().requires_grad_()
    ys = [hvd.allreduce(x * k, op=hvd.Sum) for k in range(5)]
    sum(y.sum() for y in ys).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(x.grad, torch.full_like(x, 10.0 * hvd.size()))
