# SPDX-License-Identifier: Apache-2.0
"""Backward passes: decides which passes reduce gradients, and finds the end of the outermost pass.

The Reducer uses both classes on autograd's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch

from farandole.errors import without_frames

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer

# Returns the number of the autograd task that runs on this thread, or -1 outside a backward pass.
task_id: Callable[[], int] = torch._C._current_graph_task_id
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_call_at_end: Callable[[Callable[[], None]], None]
_call_at_end = torch.autograd.Variable._execution_engine.queue_callback


def is_compiled() -> bool:
    """Returns True if this thread is in a backward pass of compiled autograd.

    Compiled autograd drops callbacks.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


class Accumulation:
    """Decides which backward passes of an optimizer reduce. The other passes only accumulate.

    Counting restarts at each reduction, step() and zero_grad().
    """

    __slots__ = ("complete", "counted", "holding", "reduced", "task", "wanted")

    def __init__(self, wanted: int) -> None:
        """`wanted` is the number of passes per reduction. Passes in no_sync() do not count."""
        self.wanted = wanted
        self.holding = False  # True in no_sync(), where passes only accumulate
        self.restart(reduced=False)

    def restart(self, reduced: bool, complete: bool = False) -> None:
        """Restarts the count at 0.

        `reduced` is True if gradients were reduced since the last step() or zero_grad().
        `complete` is True if no gradient was accumulated after that reduction.
        """
        self.counted, self.reduced, self.complete = 0, reduced, complete
        self.task = task_id()

    def is_complete(self) -> bool:
        """Returns True if no gradient was accumulated after the last reduction.

        Within a backward pass, only a reduction of that pass counts, because a user's hook may run
        before farandole's hooks have noticed the pass.
        """
        self.complete = self.complete and task_id() in (-1, self.task)
        return self.complete

    def begin_pass(self) -> bool:
        """Counts a pass. Returns True if the pass reduces."""
        self.complete = False
        self.counted += not self.holding
        return not self.holding and self.counted >= self.wanted


class BackwardPass:
    """An outermost backward pass, with the Reducers that take part in it.

    Autograd runs each backward() as a task. With reentrant checkpointing, a nested task runs inside
    a node of an outer task, but autograd does not say which task is the outer one. When a task ends
    inside a node, it therefore puts hooks on the node's next nodes. These hooks pass the reducers
    on to the task that runs the next nodes. If there is no next node, because a leaf's hook called
    backward(), the hook is put on the node itself.

    Only autograd keeps this object alive, so Python frees this object together with the task. That
    is how reducers notice that an exception has ended the pass.
    """

    __slots__ = ("__weakref__", "_reducers")

    def __init__(self) -> None:
        self._reducers: dict[Reducer, None] = {}

    def add(self, reducer: Reducer) -> ref[BackwardPass]:
        """Adds a reducer, whose round will end with the pass.

        Returns a weak reference to the pass. If Python frees the pass before the pass has ended,
        the reference calls the reducer. A `__del__` would do the same, but would swallow Ctrl-C.
        """
        self._reducers[reducer] = None
        return ref(self, reducer.on_pass_lost)

    def on_task_end(self) -> None:
        """Autograd calls this when a task ends.

        If the task is the outermost one, closes all rounds, in an order that is the same on all
        ranks, and only then waits for them.
        """
        node = _current_node()
        if node is None:
            self._end()
            return
        behind = [n for n, _ in node.next_functions if n is not None]
        for register in [n.register_prehook for n in behind] or [node.register_hook]:
            self._pass_on(register)

    def _end(self) -> None:
        reducers = sorted(self._reducers, key=attrgetter("serial"))
        self._reducers = {}
        unnamed = [r for r in reducers if r.round.closing and not r.has_name]
        for reducer in unnamed:
            reducer.choose_name(len(unnamed))
        try:
            for reducer in reducers:
                reducer.end_pass()
            for reducer in reducers:
                if reducer.round.open:
                    reducer.synchronize()
        except Exception as reason:  # makes the pass's other rounds fail as well
            for reducer in reducers:
                if reducer.round.open:
                    reducer.fail(reason)
            raise without_frames(reason)  # noqa: B904  # the same error

    def _pass_on(self, register: Callable[[Callable[..., None]], Any]) -> None:
        def pass_on(*_gradients: Any) -> None:
            hook.remove()
            around = pass_of(task_id(), self)
            if around is not self:
                for reducer in self._reducers:
                    reducer.round.inside = around.add(reducer)
                self._reducers = {}

        hook = register(pass_on)


# The outermost pass of each running autograd task, by the task's number.
_passes: WeakValueDictionary[int, BackwardPass] = WeakValueDictionary()


def pass_of(task: int, new: BackwardPass | None = None) -> BackwardPass:
    """Returns the outermost pass of a running task.

    If the task has no known pass, registers `new`, or a new pass if `new` is None.
    """
    found = _passes.get(task)
    if found is None:
        found = new or BackwardPass()
        _call_at_end(found.on_task_end)
        _passes[task] = found
    return found
