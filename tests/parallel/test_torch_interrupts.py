# SPDX-License-Identifier: Apache-2.0
"""Exceptions in a backward pass, and Ctrl-C in its wait: the round stays open until step() or
synchronize() ends it, or zero_grad() or another pass gives it up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import farandole.torch as hvd
from farandole.arrays.kinds import kind_of
from farandole.torch.gradients import gradient
from harness.in_flight import late, soon_interrupted
from harness.toys import grad_is, push, push_each, total, toys

pytestmark = pytest.mark.ranks(2, 3, 4)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "groups": {"groups": 1},
    "sum": {"op": hvd.Sum},
    "half": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("end", ["step", "synchronize"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_wait_of_a_pass_is_interrupted(options: str, end: str) -> None:
    op = OPTIONS[options].get("op", hvd.Average)
    (p, q, r), optimizer = toys(3, **OPTIONS[options])
    push_each((p, 0), (q, 0))  # what takes long the first time is no wait
    optimizer.step()
    for k in range(3):
        before = [x.tolist()[0] for x in (p, q, r)]
        optimizer.zero_grad()
        if late():
            MPI.COMM_WORLD.Barrier()
            push(p, k)
        else:
            with soon_interrupted():
                push_each((p, k), *([(q, k)] if hvd.rank() == 0 else []))
            assert p.grad is None
            MPI.COMM_WORLD.Barrier()
            getattr(optimizer, end)()
        if end == "synchronize" or late():
            optimizer.step()
        moved = [b - x.tolist()[0] for b, x in zip(before, (p, q, r), strict=True)]
        assert moved == [total(op, [k]), total(op, [k], [0]), 0.0]


SUBMISSION = {"lend", "lend_all", "lend_prepared", "submit"}  # functions of calls/


class InterruptedAt:
    """A context in which a signal is heard before one of SUBMISSION's bytecodes, by its number."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _trace(self, frame: Any, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_name not in SUBMISSION or "farandole/calls/" not in code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._left -= event == "opcode"
        if self._left < 0 and event == "opcode":
            self._left = sys.maxsize
            raise KeyboardInterrupt
        return self._trace

    @property
    def happened(self) -> bool:
        """Whether there are as many."""
        return self._left > sys.maxsize // 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [*OPTIONS, "batch"])
def test_a_signal_at_any_bytecode_of_a_submission(options: str) -> None:
    """Nothing is lost, and nothing sent twice: step() goes on from there."""
    given = {"batch": {}, **OPTIONS}[options]
    ps = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 5000)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **given)
    expected = total(given.get("op", hvd.Average), [1])
    for n in count(-2):  # what takes long the first time is not interrupted
        interrupted = InterruptedAt(n if n >= 0 and late() else sys.maxsize // 2)
        before = [p.detach().clone() for p in ps]
        with nullcontext() if options == "batch" else optimizer.no_sync(), interrupted:
            push_each(*((p, 1) for p in ps))
        with interrupted:
            optimizer.synchronize()
        optimizer.step()
        for p, b in zip(ps, before, strict=True):
            assert torch.equal(b - p.detach(), torch.full_like(b, expected)), f"at bytecode {n}"
        optimizer.zero_grad()
        if n >= 0 and not any(hvd.allgather_object(interrupted.happened)):
            break
    assert n > 50


class Preempted(RuntimeError):
    """What a user's handler raises."""


def handler(_signal: int, _frame: object) -> None:
    raise Preempted


class InterruptedAfter:
    """A context in which a signal is heard where Python hears them, at the `number`-th such place:
    as a function begins, or after a call of one that is written in C. `hear`: its handler."""

    def __init__(self, number: int, hear: Callable[[int, Any], Any] = handler) -> None:
        self._left = number
        self._handler = hear

    def __enter__(self) -> InterruptedAfter:
        self._before = signal.signal(signal.SIGUSR2, self._handler)
        sys.setprofile(self._hear)
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR2, self._before)
        reached = kind in (KeyboardInterrupt, Preempted)
        assert reached == self.happened, f"the handler's exception is lost, {kind} came"
        return reached

    def _hear(self, frame: Any, event: str, _: object) -> None:
        if event not in ("call", "c_return") or frame.f_code is self.__exit__.__code__:
            return
        self._left -= 1
        if self._left < 0:
            sys.setprofile(None)
            self._handler(signal.SIGUSR2, frame)

    @property
    def happened(self) -> bool:
        """Whether there are as many."""
        return self._left < 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hear", [signal.default_int_handler, handler], ids=["Ctrl-C", "own"])
@pytest.mark.parametrize("options", ["plain", "views", "groups"])
def test_a_signal_after_any_call_of_synchronize(options: str, hear: Any) -> None:
    """Nothing is lost, and nothing sent twice: the next synchronize() goes on from there."""
    given = OPTIONS[options]
    ps = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 5000)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **given)
    expected = total(given.get("op", hvd.Average), [1])
    for n in count(-2):  # what takes long the first time is not interrupted
        interrupted = InterruptedAfter(n if n >= 0 and late() else sys.maxsize, hear)
        before = [p.detach().clone() for p in ps]
        with optimizer.no_sync():
            push_each(*((p, 1) for p in ps))
        with interrupted:
            optimizer.synchronize()
        optimizer.synchronize()
        optimizer.step()
        for p, b in zip(ps, before, strict=True):
            assert torch.equal(b - p.detach(), torch.full_like(b, expected)), f"at call {n}"
        optimizer.zero_grad()
        if n >= 0 and not any(hvd.allgather_object(interrupted.happened)):
            break
    assert n > 50


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "lent": lambda x: kind_of(x).lent(x, x.dtype, x.shape, in_place=True),
    "describe": lambda x: kind_of(x).describe(x, in_place=True),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_signal_after_any_call_of_a_look_at_a_tensor(look: str) -> None:
    under_way = hvd.allreduce_async(torch.ones(3)) if late() else None
    for n in count():
        with InterruptedAfter(n) as interrupted:
            LOOKS[look](torch.zeros(hvd.rank()))
        if not interrupted.happened:
            break
    assert n > 3
    if under_way is None:
        under_way = hvd.allreduce_async(torch.ones(3))
    assert under_way.wait().tolist() == [1.0] * 3


def failing(p: Tensor, q: Tensor) -> None:
    """A pass that ends after p's gradient has arrived."""

    def fail(_grad: Tensor) -> None:
        raise ArithmeticError

    hidden = q * 2
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (p.sum() * 3 + hidden.sum()).backward()


GIVEN_UP: dict[str, Callable[[Tensor, Any], None]] = {
    "zero_grad": lambda p, optimizer: optimizer.zero_grad(),
    "another pass": lambda p, optimizer: push(p),
    "gone": lambda p, optimizer: optimizer._reducer.detach(),
}


@pytest.mark.parametrize("way", GIVEN_UP)
def test_a_pass_that_failed_on_one_rank_is_given_up(way: str) -> None:
    """The others' calls end with an error that says so."""
    (p, q), optimizer = toys(2)
    if late():
        failing(p, q)
        if way == "another pass":
            with suppress(hvd.MismatchError):  # the others begin another round, or none
                push(p)
        else:
            GIVEN_UP[way](p, optimizer)
    else:
        with pytest.raises(hvd.MismatchError, match=r"has given up its backward pass"):
            push_each((p, 0), (q, 0))
        if way == "another pass":
            optimizer.synchronize()
    if way == "gone":
        return
    optimizer.zero_grad()
    for k in range(2):
        push_each((p, k), (q, k + 1))
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k + 1]))
        optimizer.step()
        optimizer.zero_grad()


def test_giving_up_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the round that was given up is taken for a part of the next."""
    (p, q), optimizer = toys(2)
    push_each((p, 0), (q, 0))
    optimizer.step()
    optimizer.zero_grad()
    if late():
        failing(p, q)
        with monkeypatch.context() as patch:
            patch.setattr(gradient.Gradient, "lose", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.zero_grad()
    else:
        with pytest.raises(hvd.MismatchError, match="has given up its backward pass"):
            push_each((p, 0), (q, 0))
    for k in range(3):
        optimizer.zero_grad()
        push_each((p, k), (q, k + 1))
        grad_is(p, total(hvd.Average, [k]))
        grad_is(q, total(hvd.Average, [k + 1]))
        optimizer.step()


def interrupt(_self: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", ["plain", "groups"])
def test_a_signal_after_any_call_of_giving_up(options: str) -> None:
    """Nothing is refused twice: the next round is whole."""
    given = OPTIONS[options]
    ps = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 5000, 5000)]
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), **given)
    for n in count():
        interrupted = InterruptedAfter(n if late() else sys.maxsize)
        if late():
            failing(ps[0], ps[1])
            with interrupted:
                optimizer.zero_grad()
        else:
            with pytest.raises(hvd.MismatchError, match="has given up its backward pass"):
                push_each(*((p, 0) for p in ps))
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ps]
        push_each(*((p, 1) for p in ps))
        optimizer.step()
        for p, b in zip(ps, before, strict=True):
            expected = torch.full_like(b, total(hvd.Average, [1]))
            assert torch.equal(b - p.detach(), expected), f"at call {n}"
        if not any(hvd.allgather_object(interrupted.happened)):
            break
    assert n > 20


def test_a_pass_that_failed_is_finished_by_step() -> None:
    """With what had arrived on this rank by then."""
    (p, q), optimizer = toys(2, op=hvd.Sum)
    if late():
        failing(p, q)
        optimizer.synchronize()
    else:
        push_each((p, 0), (q, 1))
    others = range(hvd.size() - 1)
    grad_is(q, total(hvd.Sum, [1], others))
    assert p.grad is not None
    assert p.grad.tolist()[0] in (total(hvd.Sum, [0], others), total(hvd.Sum, [0], others) + 3.0)
    same = hvd.allgather_object(p.grad.tolist())
    assert all(one == same[0] for one in same)


@pytest.mark.parametrize("groups", [0, 1])
def test_a_pass_that_failed_on_all_ranks_is_followed_by_one_that_does_not(groups: int) -> None:
    (p, q), optimizer = toys(2, groups=groups)
    for way in ("zero_grad", "nothing", "zero_grad", "model"):
        failing(p, q)
        if way == "zero_grad":
            optimizer.zero_grad()
        if way == "model":
            p.grad = q.grad = None
        push(p)
        assert type(p.grad) is Tensor
        grad_is(p, total(hvd.Average, [0]))
        optimizer.step()
        optimizer.zero_grad()
