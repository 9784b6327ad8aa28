# SPDX-License-Identifier: Apache-2.0
"""Gradients that arrive once, twice, not at all, or on some ranks only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from farandole.calls.requests import PreparedTensor
from harness.toys import grad_is, push, total, toys, value

BOTH = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


# ---- missing gradients


def test_none_on_all_ranks_stays_none() -> None:
    (p, q), optimizer = toys(2)
    push(p)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]))
    grad_is(q, None)


@BOTH
def test_missing_on_some_ranks_counts_as_zeros(op: Any) -> None:
    (p, q), optimizer = toys(2, op=op)
    push(p)
    if hvd.rank() == 0:
        push(q, 1)
    optimizer.step()
    grad_is(p, total(op, [0]))
    grad_is(q, total(op, [1], [0]))
    optimizer.zero_grad()
    if hvd.rank() == hvd.size() - 1:  # nothing at all elsewhere
        push(q, 2)
    optimizer.step()
    grad_is(p, None)
    grad_is(q, total(op, [2], [hvd.size() - 1]))


def test_partly_filled_group_completes_at_step() -> None:
    (p, q, r), optimizer = toys(3, groups=1)
    push(p)
    if hvd.rank() == 0:
        push(q)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]))
    grad_is(q, total(hvd.Average, [0], [0]))
    grad_is(r, None)


# ---- several arrivals in one step


@BOTH
@pytest.mark.parametrize("times", [2, 3])
def test_second_arrival_everywhere(op: Any, times: int) -> None:
    (p, q), optimizer = toys(2, op=op)
    for _ in range(2):
        optimizer.zero_grad()
        for k in range(times):
            push(p, k)
        push(q)
        optimizer.step()
        grad_is(p, total(op, range(times)))
        grad_is(q, total(op, [0]))


@BOTH
def test_second_arrival_on_some_ranks(op: Any) -> None:
    (p, q), optimizer = toys(2, op=op)
    for late in range(hvd.size()):
        optimizer.zero_grad()
        push(p)
        push(q)
        if hvd.rank() == late:
            push(p, 1)
        optimizer.step()
        grad_is(p, total(op, [0]) + total(op, [1], [late]))
        grad_is(q, total(op, [0]))


@BOTH
def test_without_zero_grad(op: Any) -> None:
    (p, q), optimizer = toys(2, op=op)
    for k in range(3):
        push(p, k)
        if k == 0:
            push(q)
        optimizer.step()
        grad_is(p, total(op, range(k + 1)))
        grad_is(q, total(op, [0]))  # reduced once, not once per step


@BOTH
def test_arrival_after_synchronize(op: Any) -> None:
    (p,), optimizer = toys(op=op)
    push(p)
    optimizer.synchronize()
    grad_is(p, total(op, [0]))
    optimizer.synchronize()
    grad_is(p, total(op, [0]))
    push(p, 1)
    optimizer.step()
    grad_is(p, total(op, [0, 1]))


def test_set_to_none_false_keeps_the_tensor() -> None:
    (p,), optimizer = toys()
    flat = torch.zeros(8)
    p.grad = flat[2:6]
    for k in range(3):
        optimizer.zero_grad(set_to_none=False)
        push(p, k)
        optimizer.step()
        assert flat.tolist() == [0.0] * 2 + [total(hvd.Average, [k])] * 4 + [0.0] * 2


def test_second_arrival_compressed() -> None:
    (p,), optimizer = toys(compression=hvd.Compression.fp16)
    push(p)
    if hvd.rank() == 0:
        push(p, 1)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]) + total(hvd.Average, [1], [0]))


# ---- accumulation by plan


def test_no_sync() -> None:
    (p, q), optimizer = toys(2)
    with optimizer.no_sync():
        push(p)
        push(q)
    grad_is(p, value(hvd.rank()))
    push(p, 1)
    optimizer.step()  # q has not arrived again: reduced here
    grad_is(p, total(hvd.Average, [0, 1]))
    grad_is(q, total(hvd.Average, [0]))


def test_no_sync_mean() -> None:
    (p, q), optimizer = toys(2, accumulate="mean")
    with optimizer.no_sync():
        (p.sum() * value(hvd.rank()) + 3 * q.sum()).backward()
        push(p, 1)
    push(p, 2)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0, 1, 2]) / 3)
    grad_is(q, 1.0)


@pytest.mark.parametrize("accumulate", ["sum", "mean"])
def test_partial_last_window(accumulate: str) -> None:
    (p,), optimizer = toys(backward_passes_per_step=4, accumulate=accumulate)
    push(p)
    push(p, 1)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0, 1]) / (2 if accumulate == "mean" else 1))
    optimizer.zero_grad()
    for k in range(4):
        push(p, k)
    optimizer.step()
    grad_is(p, total(hvd.Average, range(4)) / (4 if accumulate == "mean" else 1))


@pytest.mark.parametrize(("wanted", "passes"), [(2, 2), (4, 2)])
def test_a_mean_where_some_ranks_have_nothing(wanted: int, passes: int) -> None:
    """Their results are divided as on the others, though they have sent nothing to divide."""
    (p, q), optimizer = toys(2, backward_passes_per_step=wanted, accumulate="mean")
    for k in range(passes):
        loss: Any = (p * value(hvd.rank(), k)).sum()
        if hvd.rank() == 0:
            loss = loss + (q * value(0, k)).sum()
        loss.backward()
    optimizer.step()
    grad_is(p, total(hvd.Average, range(passes)) / passes)
    grad_is(q, total(hvd.Average, range(passes), [0]) / passes)


def test_a_mean_with_a_late_pass_on_some_ranks() -> None:
    (p, q), optimizer = toys(2, backward_passes_per_step=2, accumulate="mean")
    for k in range(4):
        loss: Any = (p * value(hvd.rank(), k)).sum()
        if k < 2 or hvd.rank() == 0:
            loss = loss + (q * value(hvd.rank(), k)).sum()
        loss.backward()
    optimizer.step()
    grad_is(p, total(hvd.Average, range(4)) / 4)
    late = total(hvd.Average, [2, 3], [0])
    grad_is(q, (total(hvd.Average, [0, 1]) + late) / 4)


def test_reset_by_the_model_where_some_ranks_have_nothing() -> None:
    """All ranks drop all that they have: then nothing is left of what some of them had."""
    (p, q), optimizer = toys(2)
    for k in range(3):
        push(p, k)
        if hvd.rank() == 0:
            push(q, k)
        if k == 1:
            p.grad = q.grad = None
        optimizer.step()
        grad_is(p, None if k == 1 else total(hvd.Average, [k]))
        grad_is(q, None if k == 1 else total(hvd.Average, [k], [0]))
        optimizer.zero_grad()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("accumulate", ["sum", "mean"])
def test_the_first_gradient_after_a_reset_is_one_that_some_ranks_had_not(accumulate: str) -> None:
    """All ranks drop the same gradients, and keep the same."""
    (p, q), optimizer = toys(2, accumulate=accumulate)
    for _ in range(3):
        push(p)
        if hvd.rank() == 0:
            push(q)
        p.grad = q.grad = None
        push(q, 1)
        push(p, 1)
        optimizer.step()
        for x in (p, q):
            grad_is(x, total(hvd.Average, [1]) / (2 if accumulate == "mean" else 1))
        optimizer.zero_grad()


@pytest.mark.ranks(2, 3, 4)
def test_a_mean_on_top_of_a_result_is_reset_where_some_ranks_have_nothing() -> None:
    """What was divided differently is dropped on all ranks."""
    (p, q), optimizer = toys(2, accumulate="mean")
    for _ in range(3):
        for x in (p, q):
            push(x)
        optimizer.synchronize()
        push(p, 1)
        if hvd.rank() == 0:
            push(q, 1)
        p.grad = q.grad = None
        optimizer.step()
        for x in (p, q):
            grad_is(x, None)
        optimizer.zero_grad()


@pytest.mark.parametrize("to_none", [True, False, None])
def test_a_mean_after_a_step_left_out(to_none: bool | None) -> None:
    """As a GradScaler leaves it out. Passes before model.zero_grad() count no more; None: none."""
    (p, q), optimizer = toys(2, accumulate="mean")
    for x in (p, q):
        push(x)
    optimizer.synchronize()
    if to_none is not None:
        torch.optim.SGD([p, q]).zero_grad(set_to_none=to_none)
    for x in (p, q):
        push(x, 1)
    optimizer.step()
    for x in (p, q):
        if to_none is None:
            grad_is(x, total(hvd.Average, [0, 1]) / 4)
        else:
            grad_is(x, total(hvd.Average, [1]) / 2)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("held", [False, True])
def test_a_mean_after_local_passes_were_reset(held: bool) -> None:
    """`.grad = None` before anything was sent: neither the mean nor the sending counts them."""
    (p, q), optimizer = toys(2, accumulate="mean", backward_passes_per_step=2)
    with optimizer.no_sync() if held else nullcontext():
        push(p)
        if hvd.rank() == 0:  # ranks that used different parameters count alike afterwards
            push(q)
    torch.optim.SGD([p, q]).zero_grad(set_to_none=True)
    for times in (1, 2):
        for x in (p, q):
            push(x, times)
    optimizer.step()
    for x in (p, q):
        grad_is(x, total(hvd.Average, [1, 2]) / 4)


def test_a_mean_on_top_of_a_changed_result() -> None:
    """Clipped, stepped and not reset: the next step's passes are added to it, undivided."""
    (p,), optimizer = toys(1, accumulate="mean")
    push(p)
    optimizer.synchronize()
    assert p.grad is not None
    p.grad.mul_(0.5)
    optimizer.step()
    push(p, 1)
    push(p, 2)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0]) * 0.5 + total(hvd.Average, [1, 2]) / 2)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(4))
def test_an_interrupt_as_something_is_submitted(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when the core has taken a gradient, or the consensus, and no one knows."""
    (p, q, r), optimizer = toys(3, groups=1)
    calls, submit = [], PreparedTensor.submit

    def interrupted(of_core: Callable[..., int], *what: Any) -> int:
        calls.append(what)
        handle = of_core(*what)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return handle

    push(p)
    optimizer.step()  # from now on encodings do not change
    optimizer.zero_grad()
    for gradient in optimizer._reducer.gradients:
        gradient.encoding.submit = partial(interrupted, gradient.encoding.submit)
    consensus: Any = lambda self, *what: interrupted(partial(submit, self), *what)  # noqa: E731
    monkeypatch.setattr(PreparedTensor, "submit", consensus)
    for begun in (p, q):
        with suppress(KeyboardInterrupt):
            if begun is p or hvd.rank() == 0:
                push(begun, 1)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        optimizer.step()
    assert len(calls) > number
    grad_is(p, total(hvd.Average, [1]))
    grad_is(q, total(hvd.Average, [1], [0]))
    grad_is(r, None)


def test_set_backward_passes_per_step() -> None:
    (p,), optimizer = toys()
    optimizer.set_backward_passes_per_step(2)
    push(p)
    grad_is(p, value(hvd.rank()))  # still local
    push(p, 1)
    optimizer.step()
    grad_is(p, total(hvd.Average, [0, 1]))


# ---- fewer batches on some ranks


def test_join() -> None:
    (p, q), optimizer = toys(2, op=hvd.Sum)
    for k in range(2 + hvd.rank()):
        optimizer.zero_grad()
        push(p, k)
        push(q)
        optimizer.step()
        active = [rank for rank in range(hvd.size()) if k < 2 + rank]
        grad_is(p, total(hvd.Sum, [k], active))
        grad_is(q, total(hvd.Sum, [0], active))
    assert hvd.join() == hvd.size() - 1


class Moved(torch.nn.Parameter):
    """No longer on the CPU, as after `model.cuda()`."""

    is_cpu = False


@pytest.mark.ranks(2, 3, 4)
def test_a_parameter_that_has_moved_leaves_the_short_way_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, p), optimizer = toys(2)
    gradient = next(g for g in optimizer._reducer.gradients if g.parameter is p)
    arrivals = optimizer._reducer.arrivals
    put, shortly = arrivals.put, []
    monkeypatch.setattr(arrivals, "put", lambda *what: (shortly.append(what), put(*what)))
    for k in range(6):
        if k == 3:  # those of 1 and 2 went that way; on a GPU (the double) there is none
            assert len(shortly) == (2 if gradient.encoding.weight else 0)
            shortly.clear()
            p.__class__ = Moved
        optimizer.zero_grad()
        push(first)  # opens the round
        push(p, k)
        optimizer.step()
        grad_is(p, total(hvd.Average, [k]))
    assert not shortly
