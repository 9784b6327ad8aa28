# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at every moment of a wait: the next wait gives the same result."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd

# ---- an interrupt at a chosen moment of farandole's own Python code, instead of a random one

_ROOMS = {Path(m.__file__ or "").resolve().parent for m in (fd, hvd)}
_MODES = torch.autograd.grad_mode.__file__
_HANDLING = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


@contextmanager
def interrupted_at(moment: int) -> Iterator[Callable[[], bool]]:
    """KeyboardInterrupt at the `moment`-th place of this block where Python runs signal handlers.

    That is where a function of farandole's begins, where it has called one of C, and where a loop
    of its goes back. Yields a function that says whether the block had so many.
    """
    trace = _Trace(moment)
    before = sys.gettrace()
    tracer = trace.on_call  # kept: CPython 3.11 may call it once more after it has raised
    gc.disable()  # an exception in a finalizer that it runs would be dropped
    sys.settrace(tracer)
    try:
        yield lambda: trace.left < 0
    finally:
        sys.settrace(before)
        gc.enable()


def interrupted(call: Callable[[], Any], moment: int) -> bool:
    """Calls it, on one rank interrupted at that moment and then again; whether it was."""
    if moment % fd.size() != fd.rank():
        call()
        return False
    with interrupted_at(moment // fd.size()) as was:
        try:
            call()
        except KeyboardInterrupt:
            again = True
        else:
            again = False  # or Python has dropped it, in a finalizer that the collector ran
    if again:
        call()
    return was()


def at_every_moment(attempt: Callable[[int], bool], least: int = 20) -> None:
    """attempt(moment) for all moments on all ranks; it returns whether there was such a moment."""
    moment = over = 0
    while over < fd.size():
        was = attempt(moment)
        moment += 1
        over = 0 if fd.allreduce(np.array(float(was)), op=fd.Sum).item() else over + 1
    assert moment > least * fd.size()


class _Trace:
    """Follows all frames of farandole's by opcode."""

    def __init__(self, moment: int) -> None:
        self.left = moment  # places to come before the interrupt
        self._last: dict[FrameType, str] = {}  # what each frame has just executed

    def on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """For sys.settrace."""
        if frame.f_back in self._last:
            self._last[frame.f_back] = ""  # it has called Python: no handler runs at the return
        if not (_is_ours(frame.f_code) or (frame.f_back in self._last and _is_mode(frame.f_code))):
            return None
        frame.f_trace_opcodes = True
        self._last[frame] = "RESUME"
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            last, self._last[frame] = self._last[frame], _names(frame.f_code)[frame.f_lasti]
            self.left -= last.startswith(_HANDLING)
            if self.left == -1 and last.startswith(_HANDLING):
                raise KeyboardInterrupt
        return self._on_event


@cache
def _is_ours(code: CodeType) -> bool:
    return not _ROOMS.isdisjoint(Path(code.co_filename).resolve().parents)


@cache
def _is_mode(code: CodeType) -> bool:
    """Of torch.no_grad() and the like, which Ctrl-C can leave without an effect."""
    return code.co_filename == _MODES


@cache
def _names(code: CodeType) -> dict[int, str]:
    """The name of the instruction at each offset."""
    return {i.offset: i.opname for i in dis.get_instructions(code)}


# ---- what is interrupted

CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: fd.allreduce_async(x, op=fd.Sum),
    "in place": lambda x: fd.allreduce_async_(x, op=fd.Sum),
    "allgather": fd.allgather_async,
    "two": lambda x: fd.grouped_allgather_async([x, x]),
    "alltoall": fd.alltoall_async,
    "scatter": fd.scatter_async,
    "reducescatter": lambda x: fd.reducescatter_async(x, op=fd.Sum),
}


def _numbers(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_numbers(x) for x in result]
    return result.tolist()


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("call", CALLS)
def test_wait(call: str, make: Callable[[Any], Any]) -> None:
    known: list[Any] = []

    def attempt(moment: int) -> bool:
        rows = [[100.0 * fd.rank() + i] for i in range(2 * fd.size())]
        handle = CALLS[call](make(rows))
        was = interrupted(handle.wait, moment)
        numbers = _numbers(handle.wait())
        known[:] = known or [numbers]  # of a first attempt that nobody has interrupted
        assert numbers == known[0]
        return was

    assert not attempt(1000 * fd.size() + fd.rank())
    at_every_moment(attempt, least=2)
