# SPDX-License-Identifier: Apache-2.0
"""Gradients that share memory or require gradients, and join() at the end of epochs: what the
random loops of tests/strangers leave out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farandole.torch as hvd
from harness.toys import batch, grad_is, loss_of, pair, push, total, toys, value

pytestmark = pytest.mark.ranks(1, 2, 4)
several = pytest.mark.ranks(2, 4)


# ---- memory that is shared


def test_gradients_that_share_memory() -> None:
    """torch lets gradients that pass through views only share theirs."""
    p, q = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
    weights = torch.arange(16.0).view(4, 4) * (1.0 + hvd.rank())
    mean = torch.arange(16.0) * (1.0 + (hvd.size() - 1) / 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        ((p.view(4, 4) + q.view(4, 4)) * weights).sum().backward()
        optimizer.step()
        assert torch.equal(p.grad, mean)
        assert torch.equal(q.grad, mean)


def test_the_gradient_given_to_backward_is_left_alone() -> None:
    p = nn.Parameter(torch.zeros(16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    given = torch.full((4, 4), 1.0 + hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        p.view(4, 4).backward(given)
        optimizer.step()
        assert p.grad.tolist() == [1.0 + (hvd.size() - 1) / 2] * 16
        assert given.tolist() == [[1.0 + hvd.rank()] * 4] * 4


@several
def test_one_tensor_as_the_gradient_of_two_parameters() -> None:
    (p, q), optimizer = toys(2)
    for _ in range(2):
        p.grad = q.grad = torch.ones(4)
        with pytest.raises(RuntimeError, match="same memory"):
            optimizer.step()
        optimizer.zero_grad()
        p.grad = q.grad = torch.zeros(4)
        with pytest.raises(RuntimeError, match="same memory"):
            (p.sum() + q.sum()).backward()
        optimizer.zero_grad()
    optimizer.zero_grad()
    push(p)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]))


@pytest.mark.filterwarnings("ignore:Using backward")  # torch on what it can't collect
@pytest.mark.filterwarnings("ignore:backward.create_graph")
def test_gradients_that_require_gradients() -> None:
    (p, q), optimizer = toys(2)
    for k in range(3):
        optimizer.zero_grad()
        p.grad = torch.full((4,), value(hvd.rank(), k), requires_grad=True)
        loss: Any = (q * q.sum() + q * value(hvd.rank(), k)).sum()
        with optimizer.no_sync():
            loss.backward(create_graph=True)
        optimizer.synchronize()
        grad_is(p, total(hvd.Average, [k]))
        q.grad = None
        loss = (p * value(hvd.rank(), k)).sum() + (q * value(hvd.rank(), k) + q**3 * 0.0).sum()
        p.grad = None
        loss.backward(create_graph=True)
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k]))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_of_reduced_gradients_are_local() -> None:
    (p,), optimizer = toys()
    loss = (value(hvd.rank()) * (p + 1) ** 2).sum()
    told = hvd.size() > 1
    warns = pytest.warns(UserWarning, match="its derivatives are this rank's")
    with warns if told else nullcontext():
        loss.backward(create_graph=True)
    grad_is(p, 2 * total(hvd.Average, [0]))
    (second,) = torch.autograd.grad(p.grad.sum(), p)
    assert second.tolist() == [2 * value(hvd.rank())] * 4
    optimizer.zero_grad()


# ---- join at the end of every epoch


@pytest.mark.parametrize("broadcast", [True, False])
def test_join_at_the_end_of_every_epoch(broadcast: bool) -> None:
    told = not broadcast and hvd.size() > 1
    warned = pytest.warns(UserWarning, match="before join") if told else nullcontext()
    model, optimizer, _, _ = pair()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with warned:
        for epoch in range(3):
            first = (hvd.rank() + epoch) % hvd.size()
            for step in range(2 + first):
                optimizer.zero_grad()
                loss_of(model, batch(hvd.rank(), 10 * epoch + step)).backward()
                optimizer.step()
                hvd.allreduce(torch.ones(2))
                hvd.grouped_allreduce([torch.ones(2), torch.ones(3)])
            last = hvd.join()
            assert (last + epoch) % hvd.size() == hvd.size() - 1 or hvd.size() == 1
            if broadcast:
                hvd.broadcast_parameters(model.state_dict(), root_rank=last)
                hvd.broadcast_optimizer_state(optimizer, root_rank=last)
                theirs = hvd.allgather_object([p.detach().numpy() for p in model.parameters()])
                for other in theirs:
                    assert all(np.array_equal(a, b) for a, b in zip(other, theirs[0], strict=True))
