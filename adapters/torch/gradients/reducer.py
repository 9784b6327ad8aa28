# SPDX-License-Identifier: Apache-2.0
"""The reducer: all gradients of one optimizer, from hooks (autograd's threads) to the end of the
backward pass or to step(). Used by DistributedOptimizer; a lock lets one thread at a time close a
round, another one send."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from farandole.calls import leases, requests
from farandole.calls.requests import Call, Op
from farandole.calls.rounds import Limit, Round, RoundState
from farandole.errors import MismatchError
from farandole.members import size_of
from farandole.ops import Average
from farandole.topology import rank
from farandole.torch import cuda, owners
from farandole.torch.arguments import Settings
from farandole.torch.compression import Compression, check_feedback
from farandole.torch.feedback.compressor import FeedbackCompressor, State
from farandole.torch.feedback.encoding import Feedback, commit, go_on, release
from farandole.torch.gradients.batch import send_together
from farandole.torch.gradients.bucket_view import lay_out
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.gradient import Gradient
from farandole.torch.gradients.pass_end import Pass, of_task, task_id

ROOM = 64 << 10  # most bytes that wait to be sent together; see Encoding.weight

_taken, _parameter = attrgetter("grad"), attrgetter("parameter")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_set_grad: Any = _base.grad.__set__

_serials = count()
_all: WeakSet[Reducer] = WeakSet()


class Reducer:
    """Reduces gradients round by round, in backward passes; step() closes what no pass has closed.

    Gradients that arrive after theirs were sent are reduced in another round of the same pass; all
    ranks learn that by the consensus.
    """

    _kind = Gradient  # how one is reduced
    in_place = True  # gradients are reduced in their own memory

    def __init__(self, settings: Settings, wanted: int, mean: bool) -> None:
        """`wanted`: passes until one reduces, without those in no_sync(); `mean`: of all passes."""
        self._settings = settings
        self._mean = mean
        # What is added to a result can be reduced with it; by a divisor of 1, without feedback.
        self.adds = settings.reduce_op == Average
        self.wanted = wanted
        self.averages = settings.reduce_op == Average
        self.serial = next(_serials)  # equal on all ranks, up to a constant
        self.gradients: list[Gradient] = []
        self.kept: dict[str, State] = {}  # by parameter: what compressors with error feedback keep
        self._unhooked: list[Gradient] = []
        self.in_buckets = False  # gradient_as_bucket_view
        self.lent = False  # newer optimizers reduce some of its parameters
        self.holding = False  # no_sync(): gradients stay local
        self.factor = 1.0  # of this rank's gradients: its weight
        self._passes = self._counted = (
            0  # since the last round: all, and those outside of no_sync()
        )
        self._reduced = False  # a round has ended since the last step() or zero_grad()
        self.settled = False  # nothing has arrived since
        self._steps = 0  # step() calls since the last join()
        self._lock = threading.RLock()
        self._leave_pass()
        self._start()
        _all.add(self)

    def _leave_pass(self) -> None:
        self.inside: Callable[[], Pass | None] = lambda: None  # a weak reference, during a pass
        self.task: int | None = None  # autograd's that runs
        self.sending = False  # arriving gradients are taken and sent
        self.quick = False  # many by one call, unchanged
        self.capturing = False  # the pass becomes part of a CUDA graph
        self.late = self.again = False  # this rank, any rank needs another round
        self.batch: list[Gradient] = []  # of what was taken, to be sent together
        self.room = ROOM
        self.memory: set[int] = set()  # addresses that the round reduces
        self.sparse = self._at_step = 0  # RoundState's
        self._divisor = 1  # of a mean over passes
        self.scale = 1.0  # what this rank's gradients are multiplied by before they are sent

    def _start(self) -> None:
        """Makes the scope's name and round; again after shutdown() and init()."""
        self._generation = requests.generation()
        process_set = self._settings.process_set
        scope = requests.next_scope("optimizer", process_set)
        self.round: Round[Gradient] = Round(scope, process_set)
        self._joins = requests.joins(process_set)
        self._steps = 0

    # ---- parameters

    def add(self, parameter: Tensor, name: str) -> None:
        """Begins to reduce a parameter's gradients, also for older optimizers that have it."""
        gradient = self._kind(self, parameter, name, self._encoding(parameter, name))
        owners.take(gradient)
        self.gradients.append(gradient)
        self._unhooked.append(gradient)

    def lay_out(self, begin: int = 0) -> None:
        """Places gradients, from number `begin` on, in memory in which they are reduced."""
        self.in_buckets = True
        lay_out(self.gradients[begin:], self._settings.process_set)

    def _encoding(self, parameter: Tensor, name: str) -> Encoding | Feedback:
        s = self._settings
        wire = f"{self.round.scope}.{name}"
        call = Call(Op.ALLREDUCE, wire, s.process_set, s.reduce_op, s.prescale, s.postscale)
        group, members = s.groups.get(id(parameter), (None, 1))
        label = None if group is None else f"{self.round.scope}.group.{group}"
        compressor = s.compressor_of(name, parameter)
        if isinstance(compressor, FeedbackCompressor):
            check_feedback(compressor, name, s.reduce_op, in_buckets=self.in_buckets)
            state = self.kept.setdefault(name, {})
            self.adds = False
            if size_of(s.process_set) > 1:
                return Feedback(call, compressor, state, parameter)
            compressor = Compression.none
        return Encoding(call, compressor, s.sparse_as_dense, (label, members))

    def hook(self) -> None:
        """Hooks parameters without hooks that require a gradient by now."""
        if self._unhooked:
            for gradient in self._unhooked:
                if gradient.parameter.requires_grad:
                    gradient.hook()
            self._unhooked = [g for g in self._unhooked if not g.parameter.requires_grad]

    def detach(self) -> None:
        """Ends the reducer, when the optimizer is gone."""
        for gradient in self.gradients:
            owners.give_back(gradient)
        self.give_up("its optimizer is gone")

    # ---- backward passes

    def enter(self, parameter: Tensor) -> None:
        """To be called by the first hook of each of autograd's tasks, that of this parameter.

        Raises ValueError, on all ranks, if gradients that were reduced before can't be added to.
        """
        with self._lock:
            task = task_id()
            if self.inside() is None:  # the outermost pass that this reducer knows of begins
                self.give_up("another backward pass has begun")
                self.settled = False
                try:
                    of_task(task).add(self)
                except RuntimeError:  # not in a pass of autograd's engine: step() will reduce
                    return
                self._begin_pass(parameter)
            self.task = task

    def _begin_pass(self, parameter: Tensor) -> None:
        self.capturing = cuda.is_capturing(parameter)
        if self.capturing:
            return
        if self._reduced and self._passes == 0 and (self._mean or not self.adds):
            # Or has the model's own zero_grad() reset all?
            others = [g.parameter.grad for g in self.gradients if g.parameter is not parameter]
            self._reduced = not others or any(grad is not None for grad in others)
        self._passes += 1
        self._counted += not self.holding
        if not self.holding and self._counted >= self.wanted:
            self.begin()
            self.sending = True

    def end_pass(self) -> None:
        """Closes the pass's round, if it reduces. To be called at the end of the outermost pass."""
        self.inside, self.task = (lambda: None), None
        if self.sending:
            self.close(at_step=False)

    def send(self) -> None:
        """Sends what was taken and waits to be sent. Raises the core's error."""
        with self._lock:
            batch = self.batch[:]
            self.room = ROOM
            try:
                if batch:
                    send_together(self, batch)
            finally:
                del self.batch[: len(batch)]

    # ---- rounds

    def begin(self) -> None:
        """To be called before the first gradient of a round is sent. Raises ValueError, on all
        ranks, if its results can't be added to those of the step's last one."""
        if self._generation != requests.generation():
            self._start()
            for gradient in self.gradients:
                gradient.encoding = self._encoding(gradient.parameter, gradient.name)
            if self.in_buckets:  # an earlier job's memory may no longer be shared
                self.lay_out()
        self.round.begin()
        self.memory.clear()
        self._divisor = max(1, self._passes) if self._mean else 1
        self.scale = self.factor / self._divisor
        self.quick = self.scale == 1.0
        if self._reduced and not ((self.adds and self._divisor == 1) or self.again):
            raise self._refused(
                ValueError(
                    f"{self.round.scope}: gradients are reduced already, and what is added to them "
                    "now can't be told apart (op Average alone allows it, without error feedback "
                    "or a mean over passes): call step() or optimizer.zero_grad() in between; to "
                    "accumulate, use no_sync() or backward_passes_per_step"
                )
            )

    def refuse(self, gradient: Gradient, reason: Exception) -> Exception:
        """Ends the round on all ranks, since this one can't send a gradient. Returns the error."""
        return self._refused(type(reason)(f"the gradient of {gradient.name}: {reason}"))

    def _refused(self, reason: Exception) -> Exception:
        if not self.round.closed:
            self.round.refuse(reason)
            self._refuse_rest(reason)
        self.abandon()
        return reason

    def _refuse_rest(self, reason: Exception) -> None:
        """Every rank sends or refuses every gradient of a round that fails: so none waits for
        another, and all names are free for the next round. A group is completed without data."""
        for gradient in self.gradients:
            if gradient.handle is None and gradient.encoding.grouped:
                with suppress(Exception):
                    gradient.send_nothing()
            if gradient.handle is None:
                gradient.encoding.refuse(reason)

    def close(self, at_step: bool) -> None:
        """Sends the rest of the round and submits the consensus; does not wait.

        `at_step`: step() does it, unless it ends a pass that an exception has left open.
        """
        current = self.round
        if current.closed:
            return
        if not current.open:
            self.begin()
            current = self.round
        self.send()
        self.hook()
        if len(current.sent) < len(self.gradients):
            try:
                own = [g for g in self.gradients if g.handle is None and g.wanted()]
                own = [g for g in own if not owners.foreign(g)]
            except RuntimeError as reason:
                raise self._refused(reason) from None
            for gradient in own:
                gradient.take()
                gradient.send()
        joins = requests.joins(self._settings.process_set)
        if joins != self._joins:  # ranks that joined early have made fewer steps
            self._joins, self._steps = joins, 0
        if not self.again:
            self._at_step = int(at_step and not self.sending)
        equal = self._at_step, self._steps, len(current.sent), self._divisor
        current.close(RoundState(int(self.late), self.sparse, *equal))
        self.sending = False

    def synchronize(self, timeout: float | None = None, at_step: bool = False) -> None:
        """Blocks until `.grad` of all parameters is reduced: equal on all ranks.

        Nothing is done if nothing has arrived since the last time; `at_step`: step() does it. One
        thread at a time. Raises StallError after `timeout` seconds. Then, and after a signal
        handler's exception, the round stays as it is: this may be called again.
        """
        limit = Limit.of(timeout)
        with self._lock:
            if self.lent and at_step:
                owners.reduce_elsewhere(self, timeout)
            while not self.settled:
                self.close(at_step)
                self._finish(limit)

    def _finish(self, limit: Limit) -> None:
        current = self.round
        heard = current.hear(limit)
        if isinstance(heard, Exception):
            self._refuse_rest(heard)
            self.abandon()
            raise heard
        self._wait(limit)
        final = not (heard.late or heard.sparse)
        if self.kept:
            commit(current.sent)
        complaint = self._deliver(final)
        if heard.sparse:  # one gradient; the next round tells of the others
            self.gradients[heard.sparse >> 8].gather(heard.sparse & 0xFF)
        if self.kept:
            release(current.sent)
        handles = current.end()
        self.late, self.sparse, self.again = False, 0, not final
        if final:
            self._passes = self._counted = 0
            self.settled = self._reduced = True
        leases.end(handles)
        if complaint is not None:
            raise RuntimeError(complaint)

    def _deliver(self, final: bool) -> str | None:
        sent = self.round.sent
        if final and not self.again:
            plain = [g for g in sent if g.wire is None and g.handle is not None]
            with suppress(RuntimeError):  # a parameter's form has changed: one by one, then
                deque(map(_set_grad, map(_parameter, plain), map(_taken, plain)), 0)
                for gradient in plain:
                    gradient.handle = gradient.grad = None
        self.again = self.again or not final
        texts = [g.deliver(final) for g in sent if g.handle is not None]
        return next((text for text in texts if text), None)

    def _wait(self, limit: Limit) -> None:
        """Waits for the gradients, some of which take several calls."""
        current, more = self.round, True
        while more:
            failure, more = current.wait(limit), False
            if failure is None and cuda.in_use():
                cuda.join([g.handle for g in current.sent if g.handle is not None], current.sent)
            if failure is None and self.kept:
                failure, more = go_on(current)
            if failure is not None:
                self.abandon()
                raise failure

    # ---- between passes

    def give_up(self, why: str) -> None:
        """Ends a round that an exception has left open; the peers' calls get an error."""
        if not self.round.open:
            return
        text = f"{self.round.scope}: rank {rank()} has given up its backward pass: {why}"
        reason = MismatchError(f"{text} before step() or synchronize() could end it")
        self._refused(reason)

    def abandon(self) -> None:
        """Ends the round without results."""
        sent = self.round.sent
        self.round.abandon()
        if self.kept:
            release(sent)
        for gradient in self.gradients:
            gradient.lose()
        self._leave_pass()
        self._passes = self._counted = 0
        self.settled = False

    def reset(self) -> None:
        """For zero_grad(): gives up what is under way, and restarts the counts."""
        self.give_up("zero_grad() was called")
        for gradient in self.gradients:
            gradient.base = None
        self._passes = self._counted = 0
        self.settled = self._reduced = False
        self.hook()

    def stepped(self) -> None:
        """To be called after the optimizer's step."""
        self._passes = self._counted = 0
        self.settled = self._reduced = False
        self._steps += 1


def _abandon_all() -> None:
    for reducer in list(_all):
        if reducer.round.open:
            reducer.abandon()


requests.on_restart(_abandon_all)  # what was under way has ended with the runtime
