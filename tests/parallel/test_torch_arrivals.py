# SPDX-License-Identifier: Apache-2.0
"""Gradients that arrive several times in a pass, or on some ranks only; test_torch_scenarios.py has
the simple ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd
from harness.toys import grad_is, push, push_each, total, toys, value

BOTH = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


# ---- several arrivals in one pass


def segments(p: Tensor, count: int, k: int = 0) -> Tensor:
    """A loss whose gradient is that of push(p, k), in `count` reentrant segments."""
    x = torch.ones(4, requires_grad=True)
    for _ in range(count):
        run = lambda x: x + p * value(hvd.rank(), k) / count  # noqa: E731
        x = checkpoint(run, x, use_reentrant=True)
    return x.sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": {"compression": hvd.Compression.fp16},
}


@BOTH
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("late", ["all ranks", "one rank"])
def test_a_second_arrival(op: Any, options: str, late: str) -> None:
    (p, q), optimizer = toys(2, op=op, **OPTIONS[options])
    for k in range(3):
        optimizer.zero_grad()
        again = late == "all ranks" or hvd.rank() == k % hvd.size()
        (segments(p, 4 if again else 1) + (q * value(hvd.rank(), k)).sum()).backward()
        grad_is(p, total(op, [0]))
        grad_is(q, total(op, [k]))
        optimizer.step()


@pytest.mark.ranks(2, 3, 4)
def test_a_second_arrival_with_an_op_that_can_not_be_added() -> None:
    (p,), optimizer = toys(op=hvd.Min)
    push(p)  # in a job's later worlds the first pass sends nothing before its end
    optimizer.step()
    optimizer.zero_grad()
    for k in range(2):
        with pytest.raises(ValueError, match="several times in one backward pass"):
            segments(p, 4 if hvd.rank() == 0 else 1).backward()
        optimizer.zero_grad()
        push(p, k)
        grad_is(p, value(0, k))
        optimizer.step()
        optimizer.zero_grad()


# ---- several passes in one step


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("end", ["zero_grad", "step", "model"])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Min], ids=["sum", "minimum"])
def test_a_second_reduction_that_can_not_be_told_from_the_first(op: Any, end: str) -> None:
    p, q = (torch.nn.Parameter(torch.zeros(5000)) for _ in range(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), op=op)
    for _ in range(2):
        push_each((p, 0), (q, 0))
        with pytest.raises(ValueError, match=r"no_sync\(\) or backward_passes_per_step"):
            push_each((p, 0), (q, 0))
        optimizer.zero_grad()
    for _ in range(2):  # what may come between two
        push_each((p, 0), (q, 0))
        assert p.grad is not None
        first = p.grad[:1].tolist()
        if end == "step":
            optimizer.step()
        if end == "zero_grad":
            optimizer.zero_grad()
        else:
            p.grad = q.grad = None
    assert len(set(map(tuple, hvd.allgather_object(first)))) == 1


@BOTH
def test_set_to_none_false_keeps_the_tensor(op: Any) -> None:
    """Also where gradients are views of one buffer."""
    ps, optimizer = toys(3, op=op)
    flat = torch.zeros(16)
    for i, p in enumerate(ps):
        p.grad = flat[2 + 4 * i : 6 + 4 * i]
    for k in range(3):
        optimizer.zero_grad(set_to_none=False)
        push_each(*((p, k) for p in ps))
        assert flat.tolist() == [0.0] * 2 + [total(op, [k])] * 12 + [0.0] * 2
        optimizer.step()


# ---- fewer batches on some ranks


def test_join() -> None:
    (p, q), optimizer = toys(2, op=hvd.Sum)
    for k in range(2 + hvd.rank()):
        optimizer.zero_grad()
        push_each((p, k), (q, 0))
        optimizer.step()
        active = [rank for rank in range(hvd.size()) if k < 2 + rank]
        grad_is(p, total(hvd.Sum, [k], active))
        grad_is(q, total(hvd.Sum, [0], active))
    assert hvd.join() == hvd.size() - 1


def test_forms_that_change_are_not_sent_as_before() -> None:
    """Of as many bytes, in another dtype, or of another shape."""
    (first, p), optimizer = toys(2)
    forms = [torch.zeros(4), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)]
    for k, form in enumerate(x for x in forms for _ in range(3)):
        p.data = form.clone()
        optimizer.zero_grad()
        push_each((first, k), (p, k))
        assert torch.equal(p.grad, torch.full_like(form, total(hvd.Average, [k])))
        grad_is(first, total(hvd.Average, [k]))
        optimizer.step()
