# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every moment of a step: the next call ends it, and all ranks get the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

import farandole.torch as hvd
from harness.interrupts import at_every_moment, interrupted
from harness.toys import grad_is, push, total, toys

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "groups": {"groups": 1},
    "mean": {"accumulate": "mean", "backward_passes_per_step": 2},
    "half": {"compression": hvd.Compression.fp16},
    "feedback": {"compression": hvd.Compression.topk(0.5)},
}


@pytest.mark.parametrize(("name", "late"), [("synchronize", False), ("step", True)])
@pytest.mark.parametrize("options", OPTIONS)
def test_step(options: str, late: bool, name: str) -> None:
    """`late`: another backward pass has come after the first was sent."""
    known: list[Any] = []

    def attempt(moment: int) -> bool:
        optimizer.zero_grad()
        for k in range(3 if late else 1):
            push(ps[0], k)
        if hvd.rank() == 0 or (options, late) == ("mean", True):  # else it is a MismatchError
            push(ps[1])
        was = interrupted(getattr(optimizer, name), moment)
        grads = [None if p.grad is None else p.grad.tolist() for p in ps]
        known[:] = known or [grads]  # of a first attempt that nobody has interrupted
        assert grads == known[0]
        optimizer.step()
        return was

    ps, optimizer = toys(3, **OPTIONS[options])
    attempt(1 << 30)
    at_every_moment(attempt)


def test_zero_grad() -> None:
    """It drops what is under way, on all ranks, and nothing of it is seen later."""

    def attempt(moment: int) -> bool:
        for p in ps:
            push(p, 2)
        was = interrupted(optimizer.zero_grad, moment)
        for p in ps:
            push(p)
        optimizer.step()
        for p in ps:
            grad_is(p, total(hvd.Average, [0]))
        optimizer.zero_grad()
        return was

    ps, optimizer = toys(3)
    at_every_moment(attempt)
