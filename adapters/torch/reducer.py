# SPDX-License-Identifier: Apache-2.0
"""The reducer: all gradients of one optimizer, from their hooks to its step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor

from farandole.calls import leases, requests
from farandole.calls.closing import Statement
from farandole.calls.requests import Call, Op
from farandole.calls.rounds import NEVER, Limit, Round
from farandole.errors import MismatchError
from farandole.ops import Average
from farandole.torch import cuda, ownership
from farandole.torch.aliases import twins_text
from farandole.torch.arrivals import Arrivals
from farandole.torch.bucket_view import lay_out
from farandole.torch.encoding import Encoding
from farandole.torch.gradient import Gradient, settle_plain
from farandole.torch.passes import Passes, fingerprint
from farandole.torch.settings import Settings

__all__ = ["Reducer"]

_grad, _shown = attrgetter("parameter.grad"), attrgetter("shown")
_scopes: Counter[tuple[int, int]] = Counter()


class Reducer:
    """Reduces gradients round by round.

    A round closes at step(). What arrives later is sent in one more round before the same step()
    goes on; the closing word lets all ranks know.
    """

    def __init__(self, settings: Settings, passes: int, mean: bool) -> None:
        """`passes`: arrivals of a gradient before it is sent; `mean`: divide it by their number."""
        self._settings = settings
        self.averages = settings.reduce_op == Average
        self.passes = Passes(passes, mean)
        self.gradients: list[Gradient] = []
        self._unhooked: list[Gradient] = []
        self.arrivals = Arrivals(self)  # to be sent
        self.regular = True  # in this round each gradient was sent once, with what it had
        self.quick = False  # what arrives is sent at once, and unchanged
        self.again = False  # gradients arrived after they were sent
        self.settled = False  # nothing has arrived since the last synchronize()
        self.in_buckets = False  # gradients lie in memory in which they are reduced
        self.turn = 0  # step() calls
        self._lock = threading.RLock()  # of synchronize()
        self.thread: int | None = None  # that steps; another one may be in a backward pass
        self._intact = False  # nothing had been reset when the round was closed, a moment ago
        self._start()

    def _start(self) -> None:
        """Names the scope; once more after shutdown() and init()."""
        self._generation = requests.generation()
        key = (self._generation, self._settings.process_set)
        self.round: Round[Gradient] = Round(f"optimizer.{_scopes[key]}", key[1])
        _scopes[key] += 1
        self._joins = requests.joins(self._settings.process_set)
        self._steps = 0

    # ---- parameters

    def add(self, parameter: Tensor, name: str) -> None:
        """Begins to reduce a parameter's gradients; the newest optimizer to do so wins."""
        gradient = Gradient(self, parameter, name, self._encoding(parameter, name))
        ownership.adopt(gradient)
        self.gradients.append(gradient)
        self._unhooked.append(gradient)

    def lay_out(self, begin: int = 0) -> None:
        """Places the gradients from number `begin` on in memory in which they are reduced."""
        self.in_buckets = True
        lay_out(self.gradients[begin:], self._settings.process_set)

    def _encoding(self, parameter: Tensor, name: str) -> Encoding:
        s = self._settings
        wire = f"{self.round.scope}.{name}"
        call = Call(Op.ALLREDUCE, wire, s.process_set, s.reduce_op, s.prescale, s.postscale)
        group, members = s.groups.get(id(parameter), (None, 1))
        label = None if group is None else f"{self.round.scope}.group.{group}"
        compressor = s.compressor_of(name, parameter)
        return Encoding(call, compressor, s.sparse_as_dense, (label, members))

    def hook(self) -> None:
        """Hooks parameters that have none and, by now, require a gradient."""
        if self._unhooked:
            for gradient in self._unhooked:
                if gradient.parameter.requires_grad:
                    gradient.hook()
            self._unhooked = [g for g in self._unhooked if not g.parameter.requires_grad]

    def detach(self) -> None:
        """Ends: the optimizer is gone, perhaps with gradients under way."""
        for gradient in self.gradients:
            gradient.unhook()
        self.abandon()

    # ---- backward passes

    def hold(self, holding: bool) -> None:
        """Gradients stay local from here on, or not any more."""
        self.arrivals.send()
        self.passes.holding = holding
        self.quick = self.round.open and self.passes.plain

    def weigh(self, factor: float) -> None:
        """Gradients are multiplied by `factor` before they are sent."""
        self.arrivals.send()
        self.passes.factor = factor
        self.quick = self.round.open and self.passes.plain

    def set_passes(self, passes: int) -> None:
        """Changes the number of arrivals before a gradient is sent, from the next round on."""
        self.arrivals.send()
        self.passes.wanted = passes
        self.quick = self.round.open and self.passes.plain
        for gradient in self.gradients:
            gradient.left = passes

    def refuse(self, gradient: Gradient, reason: Exception) -> Exception:
        """This rank can't send a gradient: ends the round on all ranks. Gives the error to raise.

        Nobody waits for what this rank has not sent: the names are free for the next round.
        """
        reason = type(reason)(f"the gradient of {gradient.name}: {reason}")
        for other in self.gradients:
            if other.handle is None and other.wanted():
                other.encoding.refuse(reason)
        self.round.refuse(reason)
        return self._failed(reason)

    def take(self, address: int, gradient: Gradient) -> None:
        """The round reduces what begins there. Raises RuntimeError for the same memory twice."""
        other = self.round.take(address, gradient)
        if other is not gradient:
            raise RuntimeError(twins_text(gradient.name, other.name))

    # ---- rounds

    def begin(self) -> None:
        """The first gradient of a round is about to be sent."""
        if self._generation != requests.generation():
            self._start()
            for gradient in self.gradients:
                gradient.encoding = self._encoding(gradient.parameter, gradient.name)
            if self.in_buckets:  # what an earlier job has left unfinished is shared no more
                self.lay_out()
        self.round.begin()
        self.quick = self.passes.plain
        ownership.opened(self)

    def synchronize(self, timeout: float | None = None, once: bool = False) -> None:
        """Blocks until `.grad` of all parameters is reduced: equal on all ranks.

        `once`: unless that has been done since the last arrival. One thread at a time. Raises
        StallError after `timeout` seconds. Then, and after an exception of a signal handler,
        the round stays as it is, and this rank's word is given: it has to come here again before
        anything else happens to the gradients.
        """
        limit = Limit.of(timeout)
        with self._lock:
            if once:
                self.thread = threading.get_ident()
                if self.settled:
                    return
            if self.round.dropping:  # a zero_grad() has not come to its end
                self._finish(keep=False, limit=limit)
            self.again = True
            while self.again:
                self._finish(keep=True, limit=limit)
            self.settled = True

    def touched(self, gradient: Gradient, pending: Tensor) -> None:
        """The user needs a gradient, which is under way if `.grad` is `pending`: synchronizes.

        Raises RuntimeError where a gradient comes from other ranks only: whoever has made a list of
        gradients before would miss it.
        """
        with self._lock:
            if gradient.parameter.grad is not pending:  # another thread has been here
                return
            missing = [g for g in self.gradients if g.parameter.grad is None]
            self.synchronize()
        for gradient in missing:
            if gradient.parameter.grad is not None:
                raise RuntimeError(
                    f"the gradient of {gradient.name} comes from other ranks only: call "
                    "optimizer.synchronize() before gradients are used between backward() and "
                    "step()"
                )

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self.settled = False
        self.turn += 1
        self._steps += 1
        self.passes.count_anew()
        if not self.averages:  # an average of averages is itself
            for gradient in self.gradients:
                gradient.delivered.stepped()

    def drop(self) -> None:
        """Ends the round: gradients have been reset, its results are of no use.

        Those that are not reset and were sent after the others had been (by the backward pass that
        is running) stay, reduced.
        """
        self.round.check_not_promised()
        self.arrivals.send()
        sent = [] if self.round.closed else [g for g in self.round.sent if g.shown is not None]
        self._finish(keep=False, carried=sum(not g.is_reset() for g in sent))

    def reset(self) -> None:
        """zero_grad(): nothing may be under way, and counting begins anew."""
        self.round.check_not_promised()
        self.thread = threading.get_ident()
        self.arrivals.take_back()
        if self.round.open:
            self._finish(keep=False)
        for gradient in self.gradients:
            gradient.restore()
        self._count_anew()
        self.passes.count_anew()
        self.turn += 1
        self.settled = False
        self.hook()

    def close(self, keep: bool, carried: int = 0) -> None:
        """Sends what the round lacks and says the closing word; does not wait."""
        current = self.round
        self.arrivals.send()
        if current.closed:
            return
        if not current.open:
            self.begin()
            current = self.round
        self.hook()
        late = sparse = 0
        if not self.regular or len(current.sent) < len(self.gradients):
            late, sparse = self._send_rest(keep)
        joins = requests.joins(self._settings.process_set)
        if joins != self._joins:  # who has joined early has made fewer steps
            self._joins, self._steps = joins, 0
        sent = current.sent
        self._intact = keep and all(map(is_, map(_grad, sent), map(_shown, sent)))
        reset = 0 if self._intact or not keep else self._what_is_reset()
        pairs = [g.divisors() for g in self.gradients] if self.passes.mean else []
        divided = fingerprint(self.passes.divisor, pairs)
        equal = self._steps, len(sent), carried, divided, reset
        current.close(Statement(late, int(not keep), sparse, *equal))

    def _what_is_reset(self) -> int:
        gone = (i for i, g in enumerate(self.gradients) if g.handle is not None and g.is_reset())
        return hash(tuple(gone)) >> 8

    def _send_rest(self, keep: bool) -> tuple[int, int]:
        """What a Statement says of late and of sparse gradients."""
        late = sparse = 0
        for number, gradient in enumerate(self.gradients):
            if gradient.handle is None and gradient.wanted():
                gradient.send_rest(keep)
            late += gradient.late is not None
            if gradient.sparse_dim:
                sparse = (number << 8) + gradient.sparse_dim
        return late, sparse

    def _finish(self, keep: bool, carried: int = 0, limit: Limit = NEVER) -> None:
        for other in ownership.others(self, threading.get_ident()):
            other.close(keep=True)
        before = self.round.closed
        self.close(keep, carried)
        intact = self._intact and not before
        current = self.round
        heard = current.hear(limit)
        if isinstance(heard, MismatchError):  # others may wait for what this rank has not sent
            for gradient in self.gradients:
                if gradient.handle is None:
                    gradient.encoding.refuse(heard)
        if isinstance(heard, Exception):
            raise self._failed(heard)
        failure = current.wait(limit)
        if failure is not None:
            raise self._failed(failure)
        if cuda.in_use():
            cuda.join([g.handle for g in current.sent if g.handle is not None], current.sent)
        self.again = heard.late > 0 or heard.sparse > 0
        rest = [g for g in current.sent if g.handle is not None]
        if intact:
            rest = settle_plain(rest)
        with torch.no_grad():
            settled = [g.settle(keep) for g in rest]
        if heard.sparse:  # one of them; the next round is about the others
            self.gradients[heard.sparse >> 8].gather(heard.sparse & 0xFF)
        complaints = [text for text in settled if text is not None]
        if not keep:
            self.passes.count_anew()
        leases.end(self._end_round())
        if complaints and keep:
            raise RuntimeError(complaints[0])

    def _failed(self, reason: Exception) -> Exception:
        """Abandons a round that a rank has failed in. Gives the error."""
        self.round.fail()
        self.abandon()
        return reason

    def abandon(self) -> None:
        """Ends the round without its results, which will never come or are of no use."""
        self.round.drop()
        self.arrivals.take_back()
        for gradient in self.round.sent:
            gradient.forget()
        self.passes.count_anew()
        self.settled = False
        self._end_round()

    def _end_round(self) -> Sequence[int]:
        self.quick, self.regular = False, True
        ownership.ended(self)
        self._count_anew()
        return self.round.end()

    def _count_anew(self) -> None:
        if self.passes.wanted > 1:
            for gradient in self.gradients:
                gradient.left = self.passes.wanted
