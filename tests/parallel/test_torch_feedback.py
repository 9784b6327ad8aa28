# SPDX-License-Identifier: Apache-2.0
"""Compressors with error feedback, against a plain model of each that sees all ranks' gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd
from harness.feedback import (
    KINDS,
    MODELS,
    SHAPE,
    gradient,
    push,
    push_each,
    same_everywhere,
    sgd,
    weight,
)

several = pytest.mark.ranks(2, 3, 4)
each = pytest.mark.parametrize("kind", KINDS)


# ---- each algorithm


@several
@each
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_equals_its_model_step_by_step(kind: str, op: Any) -> None:
    p, n = weight(), hvd.size()
    optimizer, model = sgd(p, kind=kind, op=op), MODELS[kind](n)
    for step in range(6):
        push(p, gradient(hvd.rank(), step))
        optimizer.step()
        expected = model.step([gradient(r, step).numpy() for r in range(n)])
        expected = expected / n if op == hvd.Average else expected
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-9, atol=1e-9)
        kept = optimizer.compression_state_dict()["p0"]
        np.testing.assert_allclose(kept["residual"].numpy(), model.lost[hvd.rank()], atol=1e-9)
        same_everywhere(p)
        optimizer.zero_grad()


@several
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_nothing_is_lost_for_good(kind: str, dtype: torch.dtype) -> None:
    """What was delivered and what all ranks still keep add up to the gradients."""
    p = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    optimizer = sgd(p, kind=kind, op=hvd.Sum)
    delivered = torch.zeros(SHAPE, dtype=torch.float64)
    pushed = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(12):
        push(p, gradient(hvd.rank(), step, dtype))
        optimizer.synchronize()
        assert p.grad is not None
        assert p.grad.dtype is dtype
        same_everywhere(p.grad)
        delivered += p.grad
        pushed += sum(gradient(r, step, dtype).double() for r in range(hvd.size()))
        optimizer.zero_grad()
    kept = optimizer.compression_state_dict()["p0"]
    assert kept["residual"].dtype is torch.float32
    left = hvd.allreduce(kept["residual"].double(), op=hvd.Sum)
    if "second" in kept:
        second = hvd.allgather(kept["second"].double().reshape(-1))
        left += second[: left.numel()].view(SHAPE)
    tolerance = 1e-3 if dtype is torch.float32 else 0.5  # 12 results rounded to 8 bits
    torch.testing.assert_close(delivered + left, pushed, rtol=0, atol=tolerance)


def test_alone_nothing_is_compressed() -> None:
    if hvd.size() > 1:
        return
    p = weight()
    optimizer = sgd(p, kind="onebit")
    push(p, gradient(0, 0))
    optimizer.step()
    torch.testing.assert_close(p.detach(), -gradient(0, 0))
    assert optimizer.compression_state_dict() == {}


@several
@each
def test_small_and_long_ones_are_sent_plain(kind: str) -> None:
    small = nn.Parameter(torch.zeros(7, 3))
    p = weight()
    optimizer = sgd(small, p, kind=kind)
    push_each((small, torch.full((7, 3), float(hvd.rank()))), (p, gradient(hvd.rank(), 0)))
    optimizer.step()
    mean = sum(range(hvd.size())) / hvd.size()
    torch.testing.assert_close(small.detach(), torch.full((7, 3), -mean))
    assert list(optimizer.compression_state_dict()) == ["p1"]
    assert "residual" not in str(optimizer.state_dict())


# ---- steps that are not all alike


@several
@each
def test_a_gradient_missing_on_a_rank_counts_as_zeros(kind: str) -> None:
    p, n = weight(), hvd.size()
    optimizer, model = sgd(p, kind=kind, op=hvd.Sum), MODELS[kind](n)
    for step in range(4):
        missing = step % n if step < 3 else -1
        optimizer.zero_grad()
        if hvd.rank() != missing:
            push(p, gradient(hvd.rank(), step))
        else:
            optimizer.synchronize()
        optimizer.step()
        before = [lost.copy() for lost in model.lost]
        grads = [gradient(r, step).numpy() for r in range(n)]
        if missing >= 0:  # it sends neither a gradient nor what it keeps
            grads[missing] = -model.lost[missing]
        expected = model.step(grads)
        if missing >= 0:
            model.lost[missing] = before[missing]
        if kind == "onebit":  # its model would send signs of zeros
            same_everywhere(p)
            return
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), expected, atol=1e-9)
        same_everywhere(p)


@several
@each
def test_missing_on_all_ranks_it_stays_none(kind: str) -> None:
    used, unused = weight(), weight()
    optimizer = sgd(used, unused, kind=kind)
    for step in range(3):
        optimizer.zero_grad()
        pairs = [(used, gradient(hvd.rank(), step)), (unused, gradient(hvd.rank(), step))]
        push_each(*pairs[: 2 if step == 1 else 1])
        optimizer.step()
        assert (unused.grad is None) is (step != 1)
    same_everywhere(used)
    same_everywhere(unused)


@several
@each
def test_what_is_not_finite_leaves_no_trace(kind: str) -> None:
    p = weight()
    optimizer = sgd(p, kind=kind)
    for step, poison in enumerate([None, float("nan"), float("inf"), None]):
        optimizer.zero_grad()
        grad = gradient(hvd.rank(), step)
        if poison is not None and hvd.rank() == hvd.size() - 1:
            grad[3, 5] = poison
        before = optimizer.compression_state_dict()["p0"]
        push(p, grad)
        optimizer.synchronize()
        assert p.grad is not None
        finite = bool(torch.isfinite(p.grad).all())
        assert finite is (poison is None)
        if poison is not None:
            after = optimizer.compression_state_dict()["p0"]
            assert all(torch.equal(before[key], after[key]) for key in before)
    same_everywhere(p.grad)


@several
@each
def test_passes_no_sync_and_zero_grad(kind: str) -> None:
    """Two optimizers: one gets each gradient in parts. What is reset before it is sent changes
    nothing."""
    whole, parts = weight(), weight()
    one = sgd(whole, kind=kind)
    two = sgd(parts, kind=kind, backward_passes_per_step=2)
    for step in range(3):
        grad = gradient(hvd.rank(), step)
        push(whole, grad)
        one.step()
        one.zero_grad()
        push(parts, grad * 7)
        two.zero_grad()
        if step == 1:
            with two.no_sync():
                push(parts, grad * 0.25)
                push(parts, grad * 0.25)
            push(parts, grad * 0.25)
            push(parts, grad * 0.25)
        else:
            push(parts, grad * 0.25)
            push(parts, grad * 0.75)
        two.step()
        two.zero_grad()
    torch.testing.assert_close(whole.detach(), parts.detach())
    same_everywhere(parts)


@several
@each
def test_gradients_that_arrive_after_they_were_sent(kind: str) -> None:
    """Two rounds of one pass: both results count, and what both have lost is kept."""
    p = weight()
    optimizer = sgd(p, kind=kind, op=hvd.Sum)
    model = MODELS[kind](hvd.size())
    grads = [[gradient(r, step) for r in range(hvd.size())] for step in (0, 1)]
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    for one in [each[hvd.rank()] for each in grads]:
        run = lambda x, g=one: x + (p * g).sum()  # noqa: E731
        x = checkpoint(run, x, use_reentrant=True)
    x.backward()
    optimizer.step()
    expected = sum(model.step([x.numpy() for x in one]) for one in reversed(grads))
    np.testing.assert_allclose(-p.detach().numpy(), expected, atol=1e-9)


@several
@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_ranks_that_have_joined_send_nothing(kind: str) -> None:
    p = weight()
    optimizer = sgd(p, kind=kind, op=hvd.Sum)
    last = hvd.size() - 1
    for step in range(1 if hvd.rank() == last else 3):
        push(p, gradient(hvd.rank(), step))
        optimizer.step()
        optimizer.zero_grad()
    hvd.join()
    theirs = hvd.broadcast(p.detach(), root_rank=0)
    assert torch.isfinite(theirs).all()
    if hvd.rank() != last:
        assert torch.equal(theirs, p)


@several
@pytest.mark.parametrize("kind", ["int8", "onebit"])
def test_where_all_ranks_are_needed_a_join_is_an_error(kind: str) -> None:
    p = weight()
    optimizer = sgd(p, kind=kind)
    if hvd.rank() < hvd.size() - 1:
        with pytest.raises(RuntimeError, match="joined"):
            push(p, gradient(hvd.rank(), 0))
        optimizer.zero_grad()
    hvd.join()
    push(p, gradient(hvd.rank(), 1))
    optimizer.step()
    same_everywhere(p)


@pytest.mark.ranks(3, 4)
@each
def test_in_a_process_set(kind: str) -> None:
    members = [0, hvd.size() - 1]
    odd = hvd.add_process_set(members)
    p = weight()
    optimizer = sgd(p, kind=kind, op=hvd.Sum, process_set=odd)
    if odd.included():
        model = MODELS[kind](2)
        for step in range(3):
            optimizer.zero_grad()
            push(p, gradient(hvd.rank(), step))
            optimizer.step()
            expected = model.step([gradient(r, step).numpy() for r in members])
            assert p.grad is not None
            np.testing.assert_allclose(p.grad.numpy(), expected, atol=1e-9)
    del optimizer
    hvd.remove_process_set(odd)


@several
@each
def test_the_parameters_dtype_may_change(kind: str) -> None:
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False).double()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = sgd(module.weight, kind=kind)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float64):
        module.to(dtype)
        push(module.weight, gradient(hvd.rank(), 0, dtype))
        optimizer.step()
        optimizer.zero_grad()
        same_everywhere(module.weight)
