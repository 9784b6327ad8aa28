# SPDX-License-Identifier: Apache-2.0
"""A Reducer's backward passes in one step: when gradients are sent, their factors, and when a pass
has ended. Used where gradients arrive, on autograd's threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from farandole.torch.grad_mode import without_grad

_BACKWARD = torch.autograd.backward.__code__
task_id: Callable[[], int] = torch._C._current_graph_task_id
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
at_end_of_pass: Callable[[Callable[[], None]], None]
at_end_of_pass = torch.autograd.Variable._execution_engine.queue_callback


class Passes:
    """Counts the backward passes of this step, and how many are wanted.

    Nested ones count as parts of the outermost one: reentrant checkpointing runs a backward pass
    for each segment, within the user's.
    """

    def __init__(self, wanted: int, mean: bool) -> None:
        """`wanted`: arrivals of a gradient until it is sent; `mean`: divide it by the passes."""
        self.wanted = wanted
        self.mean = mean
        self.holding = False  # no_sync(): gradients stay local
        self.factor = 1.0  # of this rank's gradients, before they are sent
        self.seen = 0
        self.task = -1  # autograd's, from the arrival of its first gradient
        self._counted = -1  # autograd's task that was counted last
        self._pass: object = None  # identifies the outermost pass that was counted last

    @property
    def plain(self) -> bool:
        """Whether a gradient is sent as soon as it arrives, unchanged."""
        return self.wanted == 1 and self.factor == 1.0 and not self.mean and not self.holding

    @property
    def divisor(self) -> int:
        """The divisor that makes the sum of this step's passes their mean; 1 without mean."""
        return max(1, self.seen) if self.mean else 1

    def scale(self, grad: Tensor) -> None:
        """Multiplies this rank's gradient by its weight; divides it by divisor."""
        self._multiply(grad, self.factor / self.divisor)

    def unscale(self, grad: Tensor) -> None:
        """The opposite of scale(), to rounding."""
        self._multiply(grad, self.divisor / self.factor if self.factor else 1.0)

    def _multiply(self, grad: Tensor, factor: float) -> None:
        if factor != 1.0:
            _multiplied(grad, factor)

    def note(self) -> None:
        """Notes that a gradient has arrived; counts a new pass."""
        if not self.mean:
            return
        task = task_id()
        if task == self._counted:
            return
        self._counted = task
        current = _outermost()
        if current is None or current is not self._pass:
            self._pass = current
            self.seen += 1

    def count_anew(self) -> None:
        """Resets the counts, after a step or zero_grad()."""
        self.seen, self._counted, self._pass = 0, -1, None


class PassEnd:
    """Calls `act()` within backward(), when its outermost pass is over.

    Autograd ends the pass that is running alone. A nested one, as reentrant checkpointing runs, is
    a node of the pass around it: the nodes behind that node hand the end on, or, where a hook of a
    leaf has run it, that node itself.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._task = -1  # of autograd, whose end is awaited

    def awaited(self, arrived: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """`arrived`, for whose passes `act` is called."""

        def call(parameter: Tensor) -> None:
            if task_id() != self._task:
                self._await()
            arrived(parameter)

        return call

    def _await(self) -> None:
        try:
            at_end_of_pass(self._ended)
        except RuntimeError:  # not in a backward pass of autograd's engine
            return
        self._task = task_id()

    def _ended(self) -> None:
        self._task = -1
        node = _node()
        if node is None:
            self._act()
            return
        behind = [n for n, _ in node.next_functions if n is not None]
        for hooks in [n.register_prehook for n in behind] or [node.register_hook]:
            self._hand_on(hooks)

    def _hand_on(self, register: Callable[[Callable[..., None]], Any]) -> None:
        def call(*_gradients: Any) -> None:
            hook.remove()
            self._await()

        hook = register(call)


def fingerprint(passes: int, divisors: Iterable[tuple[int, int]]) -> int:
    """A number that is equal on ranks whose gradients have been divided alike.

    `divisors`: of what each gradient has sent, and of what was reduced before in this step; 0:
    nothing. Returns 0 if all were divided by `passes`, in which ranks may differ.
    """
    pairs = [(sent or passes, before) for sent, before in divisors]
    if all(pair == (passes, 0) for pair in pairs):
        return 0
    return hash((passes, *pairs)) >> 8


@without_grad
def _multiplied(grad: Tensor, factor: float) -> None:
    grad.mul_(factor)


def _outermost() -> Any:
    """An object that only the outermost backward() under way has; None: unknown.

    It is the tuple of initial gradients that each call of torch.autograd.backward makes.
    """
    found = None
    for frame in _stack():
        if frame.f_code is _BACKWARD:
            found = frame
    return None if found is None else found.f_locals.get("grad_tensors_")


def _stack() -> Iterator[FrameType]:
    """This frame's callers; in a thread of autograd's, also the main thread's frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
    if isinstance(threading.current_thread(), threading._DummyThread):
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back
