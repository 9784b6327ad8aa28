# SPDX-License-Identifier: Apache-2.0
"""The reducer: all gradients of one optimizer, from hooks (autograd's threads) to its step. Used by
DistributedOptimizer; a lock lets one thread at a time close a round."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter, is_

from torch import Tensor

from farandole.calls import leases, requests
from farandole.calls.requests import Call, Op
from farandole.calls.rounds import NEVER, Limit, Round, RoundState
from farandole.errors import MismatchError
from farandole.members import size_of
from farandole.ops import Average
from farandole.topology import rank
from farandole.torch import cuda
from farandole.torch.compression import Compression, check_feedback
from farandole.torch.feedback.compressor import FeedbackCompressor, State
from farandole.torch.feedback.encoding import Feedback, commit, go_on, release
from farandole.torch.gradients import ownership
from farandole.torch.gradients.aliases import claim
from farandole.torch.gradients.arrivals import Arrivals
from farandole.torch.gradients.bucket_view import lay_out
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.gradient import Gradient
from farandole.torch.gradients.passes import PassEnd, Passes, fingerprint
from farandole.torch.gradients.resets import ALL_RESET, await_arrivals, count_anew, what_is_reset
from farandole.torch.gradients.settings import Settings
from farandole.torch.gradients.settling import settle, settle_plain

_grad, _shown = attrgetter("parameter.grad"), attrgetter("shown")


class Reducer:
    """Reduces gradients round by round.

    A round closes at step(). Gradients that arrive after they were sent are reduced in another
    round of the same step(); all ranks learn that by the step consensus.
    """

    _kind = Gradient  # how one is reduced
    take = staticmethod(claim)

    def __init__(self, settings: Settings, passes: int, mean: bool) -> None:
        """`passes`: arrivals of a gradient before it is sent; `mean`: divide it by their number."""
        self._settings = settings
        self.averages = settings.reduce_op == Average
        self.passes = Passes(passes, mean)
        self.pass_end = PassEnd(self._pass_ended) if settings.complete_after_backward else None
        self.gradients: list[Gradient] = []
        self.kept: dict[str, State] = {}  # by parameter: what compressors with error feedback keep
        self._unhooked: list[Gradient] = []
        self.arrivals = Arrivals(self)  # gradients to be sent together
        self.regular = True  # each gradient of this round was sent once, with data
        self.quick = False  # arriving gradients are sent at once, unchanged
        self.again = False  # gradients arrived after they were sent
        self.settled = False  # nothing has arrived since the last synchronize()
        self.in_buckets = False  # gradient_as_bucket_view
        self.turn = 0  # step() calls
        self._lock = threading.RLock()  # of synchronize()
        self.thread: int | None = None  # the thread that steps; a backward pass may run on another
        self.apart = -1  # a rank that came to a round in step(), where others came in backward()
        self._intact = False  # no gradient was reset when the round was closed just now
        self.complaint: str | None = None  # of a gradient settled in this round
        self._returning = False  # a signal came as synchronize() had settled all: it is repeated
        self._start()

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
        """Begins to reduce a parameter's gradients; the newest optimizer to do so wins."""
        gradient = self._kind(self, parameter, name, self._encoding(parameter, name))
        ownership.adopt(gradient)
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

    def _pass_ended(self) -> None:
        if self.round.open and not self.passes.holding:
            self.synchronize(once=True)

    def detach(self) -> None:
        """Ends the reducer, when the optimizer is gone; gradients may be under way."""
        for gradient in self.gradients:
            gradient.unhook()
        self.abandon()

    # ---- backward passes

    def change_passes(
        self,
        *,
        holding: bool | None = None,
        factor: float | None = None,
        wanted: int | None = None,
    ) -> None:
        """Sets these fields of Passes, from the next arrival on; None: as it was."""
        self.arrivals.send()
        passes = self.passes
        if holding is not None:
            passes.holding = holding
        if factor is not None:
            passes.factor = factor
        if wanted is not None:
            passes.wanted = wanted
            await_arrivals(self)
        self.quick = self.round.open and passes.plain

    def refuse(self, gradient: Gradient, reason: Exception) -> Exception:
        """Ends the round on all ranks, since this one can't send a gradient. Returns the error.

        It refuses all gradients not yet sent, so that their names are free for the next round.
        """
        reason = type(reason)(f"the gradient of {gradient.name}: {reason}")
        for other in self.gradients:
            if other.handle is None and other.wanted():
                other.encoding.refuse(reason)
        self.round.refuse(reason)
        return self._failed(reason)

    # ---- rounds

    def begin(self) -> None:
        """To be called before the first gradient of a round is sent."""
        if self._generation != requests.generation():
            self._start()
            for gradient in self.gradients:
                gradient.encoding = self._encoding(gradient.parameter, gradient.name)
            if self.in_buckets:  # an earlier job's memory may no longer be shared
                self.lay_out()
        self.round.begin()
        self.quick = self.passes.plain
        ownership.opened(self)

    def synchronize(
        self, timeout: float | None = None, once: bool = False, stepping: bool = False
    ) -> None:
        """Blocks until `.grad` of all parameters is reduced: equal on all ranks.

        `once`: unless that has been done since the last arrival; `stepping`: step() does it, so
        the user has looked at gradients before, if at all. One thread at a time. Raises
        StallError after `timeout` seconds. Then, and after a signal handler's exception, the round
        and its consensus stay submitted: this must be called again before anything else happens
        to the gradients.
        """
        limit = Limit.of(timeout)
        try:
            with self._lock:
                if once:
                    self.thread = threading.get_ident()
                returning, self._returning = self._returning, False
                if self.settled and (once or returning):
                    return
                if self.round.dropping:  # a zero_grad() was interrupted
                    self._finish(keep=False, limit=limit)
                self.settled = False
                while not self.settled:
                    self._finish(keep=True, limit=limit, stepping=stepping)
        except BaseException:
            self._returning = self.settled
            raise

    def touched(self, gradient: Gradient, pending: Tensor) -> None:
        """Synchronizes when the user needs a gradient, if its `.grad` is still `pending`.

        Raises RuntimeError if a gradient comes from other ranks only, since a list of gradients
        that the user made before lacks it.
        """
        with self._lock:
            if gradient.parameter.grad is not pending:  # another thread has synchronized
                return
            missing = [g for g in self.gradients if g.parameter.grad is None]
            self.synchronize()
        for gradient in missing:
            if gradient.parameter.grad is not None:
                raise RuntimeError(
                    f"the gradient of {gradient.name} comes from other ranks only: use "
                    "DistributedOptimizer(..., complete_after_backward=True), or call "
                    "optimizer.synchronize() before gradients are used between backward() and "
                    "step()"
                )

    def before_step(self, timeout: float | None) -> None:
        """For step(): synchronizes, unless that has been done since the last arrival.

        Raises MismatchError if this rank has changed gradients which another rank got in step()
        only, so that their steps would differ.
        """
        self.synchronize(timeout, once=True, stepping=True)
        if self.apart < 0:
            return
        pairs = ((g, g.parameter.grad) for g in self.gradients)
        changed = next((g for g, grad in pairs if g.delivered.changed(grad, self.turn)), None)
        if changed is not None:
            raise MismatchError(
                f"{self.round.scope}: the gradient of {changed.name} was changed after backward() "
                f"and before step(), and rank {self.apart} got it in step() only, unchanged: with "
                "complete_after_backward=True all ranks make equally many backward passes; one "
                "that leaves a pass out calls optimizer.synchronize() in its place"
            )

    def stepped(self) -> None:
        """To be called after the optimizer's step."""
        self.passes.count_anew()
        if self.passes.mean or not self.averages:  # else averaging a result again changes nothing
            for gradient in self.gradients:
                gradient.delivered.stepped()
        # All at once: a signal handler that has raised before leads to no other round.
        self.settled, self.apart, self.turn = False, -1, self.turn + 1
        self._steps += 1

    def drop(self) -> None:
        """Ends the round and drops its results, after gradients have been reset.

        Gradients that were sent since the reset (by the backward pass that is running) are kept,
        reduced.
        """
        self.round.check_not_promised()
        self.arrivals.send()
        sent = [] if self.round.closed else [g for g in self.round.sent if g.shown is not None]
        self._finish(keep=False, carried=sum(not g.is_reset() for g in sent))

    def reset(self) -> None:
        """For zero_grad(): ends the round, and restarts the counts."""
        self.round.check_not_promised()
        self.thread = threading.get_ident()
        self.arrivals.take_back()
        if self.round.open:
            self._finish(keep=False)
        for gradient in self.gradients:
            gradient.restore()
        count_anew(self)
        self.settled, self.apart, self.turn = False, -1, self.turn + 1
        self.hook()

    def close(self, keep: bool, carried: int = 0, stepping: bool = False) -> None:
        """Sends the rest of the round and submits the step consensus; does not wait."""
        current = self.round
        self.arrivals.send()
        if current.closed:
            return
        if not current.open:
            self.begin()
            current = self.round
        self.hook()
        rest = not self.regular or len(current.sent) < len(self.gradients)
        late, sparse = self._send_rest(keep) if rest else (0, 0)
        joins = requests.joins(self._settings.process_set)
        if joins != self._joins:  # ranks that joined early have made fewer steps
            self._joins, self._steps = joins, 0
        sent = current.sent
        self._intact = keep and all(map(is_, map(_grad, sent), map(_shown, sent)))
        reset = 0 if self._intact or not keep else what_is_reset(self.gradients)
        compared = self.passes.mean and (keep or carried) and reset != ALL_RESET
        pairs = [g.divisors() for g in self.gradients] if compared else []
        came = (0, 0) if self.pass_end is None else (0, 1 + rank()) if stepping else (1, 0)
        equal = self._steps, len(sent), carried, fingerprint(self.passes.divisor, pairs), reset
        current.close(RoundState(late, int(not keep), sparse, *came, *equal))

    def _send_rest(self, keep: bool) -> tuple[int, int]:
        """Sends the gradients left; returns RoundState's `late` and `sparse`."""
        late = sparse = 0
        for number, gradient in enumerate(self.gradients):
            if gradient.handle is None and gradient.wanted():
                gradient.send_rest(keep)
            late += gradient.late is not None
            if gradient.sparse_dim:
                sparse = (number << 8) + gradient.sparse_dim
        return late, sparse

    def _finish(
        self, keep: bool, carried: int = 0, limit: Limit = NEVER, stepping: bool = False
    ) -> None:
        for other in ownership.others(self, threading.get_ident()):
            other.close(keep=True)
        before = self.round.closed
        self.close(keep, carried, stepping)
        intact = self._intact and not before
        current = self.round
        heard = current.hear(limit)
        if isinstance(heard, MismatchError):  # others may wait for this rank's unsent gradients
            for gradient in self.gradients:
                if gradient.handle is None:
                    gradient.encoding.refuse(heard)
        if isinstance(heard, Exception):
            raise self._failed(heard)
        self._wait(limit)
        self.again = heard.late > 0 or heard.sparse > 0
        if heard.early and heard.stepping:
            self.apart = heard.stepping - 1
        rest = [g for g in current.sent if g.handle is not None]
        if intact:
            rest = settle_plain(rest)
        if self.kept and (keep or carried):
            commit(rest)
        settle(rest, keep and heard.reset != ALL_RESET)
        if heard.sparse:  # one gradient; the next round tells of the others
            self.gradients[heard.sparse >> 8].gather(heard.sparse & 0xFF)
        complaint = self.complaint if keep else None
        if not keep:
            self.passes.count_anew()
        leases.end(self._end_round(settled=keep and not self.again and complaint is None))
        if complaint is not None:
            raise RuntimeError(complaint)

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
                raise self._failed(failure)

    def _failed(self, reason: Exception) -> Exception:
        """Abandons a round that has failed on some rank. Returns the error."""
        self.round.fail()
        self.abandon()
        return reason

    def abandon(self) -> None:
        """Ends the round without results."""
        self.round.drop()
        self.arrivals.take_back()
        for gradient in self.round.sent:
            gradient.forget()
        self.passes.count_anew()
        self._end_round(settled=False)

    def _end_round(self, settled: bool) -> Sequence[int]:
        self.quick, self.regular = False, True
        ownership.ended(self)
        if self.passes.wanted > 1:
            await_arrivals(self)
        if self.kept:
            release(self.round.sent)
        handles = self.round.end()
        self.settled, self.complaint = settled, None
        return handles
