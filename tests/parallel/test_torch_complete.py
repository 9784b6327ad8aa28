# SPDX-License-Identifier: Apache-2.0
"""Gradients are complete when backward() returns: DDP's promises."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd
from harness.toys import assert_same, batch, grad_is, joined, loss_of, pair, push, total, toys

together = pytest.mark.ranks(2, 3, 4)


def grads_are_same(model: nn.Module, reference: nn.Module) -> None:
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            assert type(own.grad) is Tensor
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipped_logged_and_changed(foreach: bool) -> None:
    model, optimizer, reference, plain = pair()
    for step in range(4):
        norms = []
        for net, data in (model, batch(hvd.rank(), step)), (reference, joined(step)):
            net.zero_grad()
            loss_of(net, data).backward()
            grads: Any = [p.grad for p in net.parameters()]
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=foreach))
            torch._foreach_mul_(grads, 0.5)
        grads_are_same(model, reference)
        torch.testing.assert_close(*norms)
        optimizer.step()
        plain.step()
        assert_same(model, reference)


@together
@pytest.mark.parametrize("way", ["no pass", "no_sync", "a pass too few"])
def test_who_leaves_a_pass_out_is_told_on_all_ranks(way: str) -> None:
    passes = 2 if way == "a pass too few" else 1
    (p,), optimizer = toys(backward_passes_per_step=passes)

    def backward(count: int) -> None:
        for k in range(count):
            push(p, k)

    def step() -> None:
        if hvd.rank() == 0:
            backward(passes)
        else:
            with optimizer.no_sync() if way == "no_sync" else nullcontext():
                backward(passes - (way != "no_sync"))
            optimizer.step()

    for _ in range(2):
        backward(passes)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(hvd.MismatchError, match=r"optimizer\.synchronize\(\) instead"):
            step()
        optimizer.zero_grad()
    backward(passes)
    grad_is(p, total(hvd.Average, range(passes)))
    optimizer.step()


def test_a_pass_within_the_hook_of_a_leaf_alone() -> None:
    (p,), optimizer = toys()
    x = torch.ones(4, requires_grad=True)

    def inner(_x: Tensor) -> None:
        with torch.enable_grad():
            push(p)

    x.register_hook(inner)
    for _ in range(2):
        optimizer.zero_grad()
        x.sum().backward()
        assert type(p.grad) is Tensor
        grad_is(p, total(hvd.Average, [0]))
        optimizer.step()


@together
def test_a_pass_too_few_is_named_in_the_error() -> None:
    (p,), optimizer = toys()
    push(p)
    if hvd.rank() != 0:
        optimizer.step()
    with pytest.raises(hvd.MismatchError, match=r"call step\(\) and backward\(\) equally often"):
        push(p)


class Segments(nn.Module):
    """Recomputes its layers in backward passes of their own, each within that of the next."""

    def __init__(self, head: bool, depth: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(3))
        self.head = nn.Linear(5, 1).double() if head else None
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            call: Any = layer
            for _ in range(self.depth):
                call = _again(call)
            x = call(x).tanh()
        return x if self.head is None else self.head(x)


def _again(call: Any) -> Any:
    return lambda x: checkpoint(call, x, use_reentrant=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("head", [True, False], ids=["with a head", "checkpoints only"])
@pytest.mark.parametrize("several", [False, True])
def test_reentrant_checkpoints_are_one_pass(head: bool, depth: int, several: bool) -> None:
    """`several`: of two optimizers, one begins within a nested pass."""
    model, optimizer, reference, plain = pair(model=lambda: Segments(head, depth))
    if several:
        inner: Any = torch.optim.SGD(list(model.layers[0].parameters()), lr=0.0)  # type: ignore[index,union-attr]
        inner = hvd.DistributedOptimizer(inner)
        outer = [p for g in optimizer.param_groups for p in g["params"]][2:]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(outer, lr=0.1, momentum=0.9))
        plain.param_groups[0]["params"] = list(reference.parameters())[2:]
    for step in range(3):
        for net, data in (model, batch(hvd.rank(), step)), (reference, joined(step)):
            net.zero_grad()
            net(data[0]).square().mean().backward()
        grads_are_same(model, reference)
        if optimizer._reducer is not None:
            assert optimizer._reducer.accumulation.complete
        optimizer.step()
        plain.step()
        assert_same(model, reference)
