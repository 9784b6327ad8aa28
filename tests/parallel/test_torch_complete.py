# SPDX-License-Identifier: Apache-2.0
"""Gradients are complete when backward() returns: DDP's promises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd
from harness.toys import assert_same, batch, grad_is, joined, loss_of, network, push, total, toys

together = pytest.mark.ranks(2, 3, 4)


def both(model: Callable[[], nn.Module] = network) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model that all ranks train, and one that this rank trains on the joined batch."""
    own, reference = model(), model()
    sgd = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, own.named_parameters())
    return own, optimizer, reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)


def grads_are_same(model: nn.Module, reference: nn.Module) -> None:
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            assert type(own.grad) is Tensor
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipped_logged_and_changed(foreach: bool) -> None:
    model, optimizer, reference, plain = both()
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


def test_several_passes_with_a_look_between() -> None:
    model, optimizer, reference, plain = both()
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(3):
            loss_of(model, batch(hvd.rank(), step, part)).backward()
            loss_of(reference, joined(step, part)).backward()
            grads_are_same(model, reference)
            for p in [*model.parameters(), *reference.parameters()]:
                assert p.grad is not None
                p.grad.mul_(0.75)
        optimizer.step()
        plain.step()
        assert_same(model, reference)


def test_one_graph_several_losses() -> None:
    model, optimizer, reference, plain = both()
    for step in range(3):
        for net, data in (model, batch(hvd.rank(), step)), (reference, joined(step)):
            net.zero_grad()
            output = net(data[0])
            output.square().mean().backward(retain_graph=True)
            (output - data[1]).abs().mean().backward()
        grads_are_same(model, reference)
        optimizer.step()
        plain.step()
        assert_same(model, reference)


def test_no_sync_keeps_gradients_local() -> None:
    (p,), optimizer = toys()
    with optimizer.no_sync():
        push(p, 1)
        assert p.grad is not None
        assert p.grad.tolist() == [12.0 * (1 + hvd.rank()) * 11] * 4
    push(p, 2)
    grad_is(p, total(hvd.Average, [1, 2]))
    optimizer.step()
    assert p.tolist() == [-total(hvd.Average, [1, 2])] * 4


def test_every_second_pass() -> None:
    (p,), optimizer = toys(backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        push(p, 1)
        push(p, 2)
        assert type(p.grad) is Tensor
        grad_is(p, total(hvd.Average, [1, 2]))
        optimizer.step()


@together
def test_used_by_one_rank_only() -> None:
    (p, q, r), optimizer = toys(3)
    for used in range(hvd.size()):
        optimizer.zero_grad()
        loss: Any = p.sum() * (1.0 + hvd.rank())
        if hvd.rank() == used:
            loss = loss + q.sum() * 6.0 * hvd.size()
        loss.backward()
        grads = [x.grad for x in (p, q, r)]
        assert [type(x) for x in grads] == [Tensor, Tensor, type(None)]
        assert grads[0] is not None
        assert grads[1] is not None
        assert grads[0].tolist() == [(1 + hvd.size()) / 2] * 4
        assert grads[1].tolist() == [6.0] * 4
        optimizer.step()


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
        with pytest.raises(hvd.MismatchError, match=r"optimizer\.synchronize\(\) in its place"):
            step()
        optimizer.zero_grad()
    backward(passes)
    grad_is(p, total(hvd.Average, range(passes)))
    optimizer.step()


@together
def test_who_has_no_gradients_synchronizes_instead() -> None:
    (p,), optimizer = toys()
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            push(p)
        else:
            optimizer.synchronize()
        grad_is(p, 12.0 / hvd.size())
        torch.nn.utils.clip_grad_norm_([p], 1e-3)
        optimizer.step()
        assert len(set(hvd.allgather_object(p.tolist()[0]))) == 1


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
    model, optimizer, reference, plain = both(lambda: Segments(head, depth))
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
            assert optimizer._reducer.passes.settled
        optimizer.step()
        plain.step()
        assert_same(model, reference)


def test_sparse_rows() -> None:
    layer = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        layer(torch.tensor([hvd.rank(), 4 + step % 2])).sum().backward()
        grad: Any = layer.weight.grad
        assert type(grad) is Tensor
        assert grad.is_sparse
        expected = torch.zeros(6, 2)
        expected[: hvd.size()] += 1.0
        expected[4 + step % 2] += hvd.size()
        torch.testing.assert_close(grad.to_dense(), expected)
        optimizer.step()


@together
def test_two_optimizers_one_loss() -> None:
    (p,), first = toys()
    (q,), second = toys()
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        order = (p, q) if hvd.rank() == 0 else (q, p)
        loss: Any = order[0].sum() * 2.0 * hvd.rank() + order[1].sum() * 2.0 * hvd.rank()
        loss.backward()
        assert type(p.grad) is type(q.grad) is Tensor
        grad_is(p, hvd.size() - 1.0)
        grad_is(q, hvd.size() - 1.0)
        for optimizer in (first, second) if hvd.rank() == 0 else (second, first):
            optimizer.step()


@together
def test_backward_raises_typed_errors_on_all_ranks() -> None:
    (p, q), optimizer = toys(2)
    push(p)
    optimizer.step()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        q.requires_grad_(False)
    with pytest.raises(hvd.MismatchError):
        push(p)
