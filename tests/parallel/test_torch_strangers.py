# SPDX-License-Identifier: Apache-2.0
"""Loops as people write them who have not read our docs."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd
from harness.in_flight import canaries, finish, late, soon_interrupted
from harness.toys import assert_same, batch, grad_is, joined, loss_of, network, push, total, toys

pytestmark = pytest.mark.ranks(1, 2, 4)
BOTH = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
several = pytest.mark.ranks(2, 4)


def pair(**options: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A model with its distributed optimizer, and both again for one process."""
    model, reference = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    return model, hvd.DistributedOptimizer(optimizer, **options), reference, plain


# ---- what goes away in flight


@several
def test_optimizer_and_model_go_between_backward_and_step() -> None:
    def begin() -> Any:
        ps = [nn.Parameter(torch.zeros(4096)) for _ in range(4)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0))
        for p in ps:
            push(p)
        return optimizer, ps

    def fail() -> None:
        begin()
        raise ArithmeticError

    if not late():
        with pytest.raises(ArithmeticError):
            fail()
    kept = begin() if late() else None
    with canaries():
        finish(gc.collect)
    del kept
    gc.collect()
    (p,), optimizer = toys()
    push(p)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]))


@several
def test_optimizer_goes_after_step_has_timed_out() -> None:
    def begin(timeout: float | None) -> None:
        ps, optimizer = toys(3)
        for p in ps:
            push(p)
        optimizer.step(timeout=timeout)

    if not late():
        with pytest.raises(hvd.StallError):
            begin(0.01)
    with canaries():
        finish(lambda: begin(None))


# ---- autograd.grad


def test_autograd_grad_leaves_gradients_alone() -> None:
    (p,), optimizer = toys()
    push(p)
    optimizer.step()
    loss = (p * p * (1.0 + hvd.rank())).sum()
    (g,) = torch.autograd.grad(loss, [p])
    grad_is(p, total(hvd.Average, [0]))
    assert torch.equal(g, 2.0 * p.detach() * (1.0 + hvd.rank()))
    optimizer.zero_grad()
    push(p)
    torch.autograd.grad((p * 3.0).sum(), [p])
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]))


@BOTH
def test_gradients_from_autograd_grad(op: Any) -> None:
    """p.grad = g for every step: sent as it is, without what was there before."""
    (p, q), optimizer = toys(2, op=op)
    for k in range(4):
        loss = (p * total(hvd.Sum, [k], [hvd.rank()])).sum() + q.sum() * 2.0
        p.grad, q.grad = torch.autograd.grad(loss, [p, q])
        optimizer.step()
        grad_is(p, total(op, [k]))
        grad_is(q, 2.0 if op is hvd.Average else 2.0 * hvd.size())


def test_second_order_optimizer_trains() -> None:
    """A gradient penalty through autograd.grad, then backward()."""
    model, optimizer, reference, plain = pair()

    def penalised(net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(net, data)
        slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        return loss + 0.1 * sum(slope.square().sum() for slope in slopes)

    for step in range(3):
        optimizer.zero_grad()
        penalised(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
        losses = [penalised(reference, batch(rank, step)) for rank in range(hvd.size())]
        plain.zero_grad()
        (sum(losses) / hvd.size()).backward()  # type: ignore[union-attr]
        plain.step()
    assert_same(model, reference)


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


@BOTH
def test_gradients_that_are_views_of_one_buffer(op: Any) -> None:
    ps, optimizer = toys(4, op=op)
    flat = torch.zeros(16)
    for i, p in enumerate(ps):
        p.grad = flat[4 * i : 4 * i + 4]
    for k in range(3):
        optimizer.zero_grad(set_to_none=False)
        sum((p * total(hvd.Sum, [k], [hvd.rank()])).sum() for p in ps).backward()  # type: ignore[union-attr]
        optimizer.step()
        assert flat.tolist() == [total(op, [k])] * 16
        flat.zero_()


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


# ---- means over passes


def segments(p: Tensor, count: int, k: int) -> Tensor:
    """A loss whose gradient is that of push(p, k), in `count` reentrant segments."""
    x = torch.ones(4, requires_grad=True)
    for _ in range(count):
        run = lambda x: x + p * total(hvd.Sum, [k], [hvd.rank()]) / count  # noqa: E731
        x = checkpoint(run, x, use_reentrant=True)
    return x.sum()


@pytest.mark.parametrize("passes", [1, 2])
def test_mean_over_passes_with_reentrant_checkpoints(passes: int) -> None:
    (p,), optimizer = toys(accumulate="mean", backward_passes_per_step=passes)
    for _ in range(2):
        optimizer.zero_grad()
        for k in range(passes):
            segments(p, 4, k).backward()
        optimizer.step()
        expected = total(hvd.Average, range(passes)) / passes
        torch.testing.assert_close(p.grad, torch.full((4,), expected))


@pytest.mark.parametrize("passes", [2, 3, 4])
@pytest.mark.parametrize("planned", [1, 2])
def test_mean_over_more_passes_than_planned(planned: int, passes: int) -> None:
    (p, q), optimizer = toys(2, accumulate="mean", backward_passes_per_step=planned)
    for _ in range(2):
        optimizer.zero_grad()
        for k in range(passes):
            push(p, k)
            if k == 0:
                push(q, k)
        optimizer.step()
    # push() is a pass of its own for each
    expected = total(hvd.Average, range(passes)) / (passes + 1)
    torch.testing.assert_close(p.grad, torch.full((4,), expected))
    torch.testing.assert_close(q.grad, torch.full((4,), total(hvd.Average, [0]) / (passes + 1)))


# ---- sums


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Min, hvd.Max])
def test_an_edited_sum_is_not_reduced_again(op: Any) -> None:
    (p,), optimizer = toys(op=op)
    push(p)
    optimizer.synchronize()
    assert p.grad is not None
    p.grad.fill_(3.0)  # as clipping would, equal on all ranks
    push(p, 1)
    optimizer.step()
    ranks = {hvd.Sum: None, hvd.Min: [0], hvd.Max: [hvd.size() - 1]}[op]
    grad_is(p, 3.0 + total(hvd.Sum, [1], ranks))


@BOTH
def test_a_gradient_written_by_hand_is_reduced(op: Any) -> None:
    (p,), optimizer = toys(op=op)
    push(p)
    optimizer.step()
    for k in range(3):
        assert p.grad is not None
        p.grad.copy_(torch.full((4,), total(hvd.Sum, [k], [hvd.rank()])))
        optimizer.step()
        grad_is(p, total(op, [k]))


# ---- torch's recipes


def test_clipping_as_in_torchs_docs() -> None:
    model, optimizer, reference, plain = pair()
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, joined(step)).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        torch.testing.assert_close(norm, expected)
    assert_same(model, reference)


def test_grad_scaler_as_in_torchs_docs() -> None:
    model, optimizer, reference, plain = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, batch(hvd.rank(), step))
        broken = step == 2 and late()
        scaler.scale(loss * float("inf") if broken else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            plain.zero_grad()
            loss_of(reference, joined(step)).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step()
    assert_same(model, reference)
    assert len(set(hvd.allgather_object(scaler.get_scale()))) == 1


def test_logging_gradients_on_one_rank() -> None:
    model, optimizer, reference, plain = pair()
    kept: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        if hvd.rank() == 0:
            kept += [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        plain.zero_grad()
        loss_of(reference, joined(step)).backward()
        if hvd.rank() == 0:
            for own, p in zip(kept[4 * step :], reference.parameters(), strict=True):
                torch.testing.assert_close(torch.linalg.norm(own), torch.linalg.norm(p.grad))
        plain.step()
    first = torch.linalg.norm(kept[0]) if kept else None
    assert first is None or not torch.equal(first, torch.linalg.norm(kept[-4]))
    assert_same(model, reference)


# ---- signals


@several
def test_step_goes_on_after_a_signal() -> None:
    (p, q), optimizer = toys(2)
    for k in range(3):
        optimizer.zero_grad()
        push(p, k)
        if hvd.rank() == 0:
            push(q, k)
        if not late():
            with soon_interrupted():
                optimizer.step()
        hvd.barrier()
        optimizer.step()
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k], [0]))


@several
def test_zero_grad_goes_on_after_a_signal() -> None:
    (p,), optimizer = toys()
    push(p)
    if not late():
        with soon_interrupted():
            optimizer.zero_grad()
    hvd.barrier()
    optimizer.zero_grad()
    grad_is(p, None)
    push(p, 1)
    optimizer.step()
    grad_is(p, total(hvd.Average, [1]))


@several
def test_gradients_reset_on_one_rank_only() -> None:
    (p, q), optimizer = toys(2)
    push(p)
    if hvd.rank() == 0:
        push(q)
        q.grad = None
    with pytest.raises(hvd.MismatchError, match="reset gradients on all ranks alike"):
        optimizer.step()
    optimizer.zero_grad()
    push(p, 1)
    optimizer.step()
    grad_is(p, total(hvd.Average, [1]))
    grad_is(q, None)


# ---- join at the end of every epoch


@pytest.mark.parametrize("broadcast", [True, False])
def test_join_at_the_end_of_every_epoch(broadcast: bool) -> None:
    model, optimizer, _, _ = pair()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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
