# SPDX-License-Identifier: Apache-2.0
"""Backward passes of one step: when gradients are sent, and what they are multiplied by before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Passes", "fingerprint"]

_BACKWARD = torch.autograd.backward.__code__


class Passes:
    """How many backward passes this step has had, and is to have.

    Nested ones are parts of the outermost one: reentrant checkpointing runs a backward pass of its
    own for each segment, within the user's.
    """

    def __init__(self, wanted: int, mean: bool) -> None:
        """`wanted`: arrivals of a gradient until it is sent; `mean`: divide it by the passes."""
        self.wanted = wanted
        self.mean = mean
        self.holding = False  # no_sync(): gradients stay local
        self.factor = 1.0  # of this rank's gradients, before they are sent
        self.seen = 0
        self._task = -1  # of autograd, that was looked at last
        self._pass: object = None  # what only the outermost pass that was counted last has

    @property
    def plain(self) -> bool:
        """Whether a gradient is sent as soon as it arrives, as it is."""
        return self.wanted == 1 and self.factor == 1.0 and not self.mean and not self.holding

    @property
    def divisor(self) -> int:
        """What makes the sum of this step's backward passes their mean, if that is wanted."""
        return max(1, self.seen) if self.mean else 1

    def scale(self, grad: Tensor) -> None:
        """Weighs this rank's gradient; makes a sum over backward passes their mean."""
        factor = self.factor / self.divisor
        if factor != 1.0:
            with torch.no_grad():
                grad.mul_(factor)

    def note(self) -> None:
        """A gradient has arrived, in some pass."""
        if not self.mean:
            return
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        current = _outermost()
        if current is None or current is not self._pass:
            self._pass = current
            self.seen += 1

    def count_anew(self) -> None:
        """A step is over, or begins anew."""
        self.seen, self._task, self._pass = 0, -1, None


def fingerprint(passes: int, divisors: Iterable[tuple[int, int]]) -> int:
    """A number that is equal on ranks whose gradients have been divided alike.

    `divisors`: of what each gradient has sent, and of what was reduced before in this step; 0:
    nothing. Gives 0 where all were divided by `passes`: then ranks may differ in that.
    """
    pairs = list(divisors)
    if all(sent in (0, passes) and before == 0 for sent, before in pairs):
        return 0
    return hash((passes, *pairs)) >> 8


def _outermost() -> Any:
    """An object that belongs to the outermost backward() under way alone; None: cannot be told.

    It is the tuple of first gradients that each call of torch.autograd.backward makes.
    """
    found = None
    for frame in _stack():
        if frame.f_code is _BACKWARD:
            found = frame
    return None if found is None else found.f_locals.get("grad_tensors_")


def _stack() -> Iterator[FrameType]:
    """The frames under this one, then, in a thread of autograd's, those of the main thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
    if isinstance(threading.current_thread(), threading._DummyThread):
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back
