# SPDX-License-Identifier: Apache-2.0
"""Gradients of the synchronous calls: those that Horovod's users rely on."""

from __future__ import annotations

import pytest
import torch

import farandole.torch as hvd
from harness.gradients import CASES
from harness.toys import gradient_of, leaf, own


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    rows, call, right = CASES[case](list(range(hvd.size())))
    x = leaf(rows)
    assert gradient_of(x, call(hvd, x)) == pytest.approx(right)


def test_ops_without_a_derivative() -> None:
    for op in (hvd.Max, hvd.Min, hvd.Product):
        for call in (hvd.allreduce, hvd.reducescatter):
            x = leaf(2 * hvd.size())
            with pytest.raises(NotImplementedError, match="differentiable for"):
                call(x, op=op).sum().backward()


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
