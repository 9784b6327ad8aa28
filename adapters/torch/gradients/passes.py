# SPDX-License-Identifier: Apache-2.0
"""Backward passes: which of them reduce; and the end of an outermost one, at which Reducers close
their rounds, within backward() itself. Used by Reducers, on autograd's threads."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer

task_id: Callable[[], int] = torch._C._current_graph_task_id
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_at_end: Callable[[Callable[[], None]], None]
_at_end = torch.autograd.Variable._execution_engine.queue_callback


class Passes:
    """Which passes of an optimizer reduce; counted from each reduction, step or reset on."""

    __slots__ = ("complete", "counted", "holding", "made", "mean", "reduced", "wanted")

    def __init__(self, wanted: int, mean: bool) -> None:
        """`wanted`: passes until one reduces, without those in no_sync(); `mean`: of all passes."""
        self.wanted = wanted
        self.mean = mean
        self.holding = False  # no_sync(): gradients stay local
        self.restart(reduced=False)

    def restart(self, reduced: bool) -> None:
        """Counts from 0. `reduced`: gradients are, since the last step() or zero_grad(); `complete`
        says that nothing has arrived since."""
        self.made = self.counted = 0  # passes: all, and those outside of no_sync()
        self.reduced, self.complete = reduced, False

    def begin(self) -> bool:
        """Counts a pass; returns whether it reduces."""
        self.made += 1
        self.counted += not self.holding
        return not self.holding and self.counted >= self.wanted

    @property
    def divisor(self) -> int:
        """What gradients are divided by."""
        return max(1, self.made) if self.mean else 1


class Pass:
    """An outermost backward pass, and the Reducers that something arrives for in it.

    Autograd runs each pass as a task, and ends one that is running alone. A nested one, as
    reentrant checkpointing runs, is a node of the task around it: the nodes behind that node hand
    the end on, or, where a hook of a leaf has run it, that node itself. Only autograd keeps this
    object alive: it goes with the task, so an exception that has ended the pass ends it too.
    """

    __slots__ = ("__weakref__", "_reducers")

    def __init__(self) -> None:
        self._reducers: dict[Reducer, None] = {}

    def add(self, reducer: Reducer) -> ref[Pass]:
        """Lets the reducer take part in its end."""
        self._reducers[reducer] = None
        return ref(self)

    def ended(self) -> None:
        """Called by autograd when a task is over. All rounds are closed before one is waited for,
        in an order that is equal on all ranks."""
        node = _node()
        if node is None:
            reducers = sorted(self._reducers, key=attrgetter("serial"))
            for reducer in reducers:
                reducer.end_pass()
            for reducer in reducers:
                if reducer.round.open:
                    reducer.synchronize()
            return
        behind = [n for n, _ in node.next_functions if n is not None]
        for hooks in [n.register_prehook for n in behind] or [node.register_hook]:
            self._hand_on(hooks)

    def _hand_on(self, register: Callable[[Callable[..., None]], Any]) -> None:
        def call(*_gradients: Any) -> None:
            hook.remove()
            around = of_task(task_id(), self)
            if around is not self:
                for reducer in self._reducers:
                    reducer.now.inside = around.add(reducer)

        hook = register(call)


_passes: WeakValueDictionary[int, Pass] = WeakValueDictionary()  # by autograd's task


def of_task(task: int, new: Pass | None = None) -> Pass:
    """The pass that a task, which is running, belongs to as far as is known; else a new one.

    Raises RuntimeError outside of a backward pass of autograd's engine.
    """
    found = _passes.get(task)
    if found is None:
        found = new or Pass()
        _at_end(found.ended)
        _passes[task] = found
    return found
