# SPDX-License-Identifier: Apache-2.0
"""The reducer: all gradients of one optimizer, from their hooks to its step."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from farandole import leases, requests
from farandole._library import error, lib
from farandole.buffers import EMPTY
from farandole.errors import MismatchError
from farandole.handles import wait_until
from farandole.ops import Average
from farandole.requests import Call, Op
from farandole.torch import cuda, ownership
from farandole.torch.aliases import twins_text
from farandole.torch.bucket_view import lay_out
from farandole.torch.closing import ClosingWord, Statement
from farandole.torch.encoding import Encoding
from farandole.torch.gradient import Gradient
from farandole.torch.lateness import late
from farandole.torch.passes import Passes, fingerprint
from farandole.torch.settings import Settings

__all__ = ["Reducer"]

_scopes: Counter[tuple[int, int]] = Counter()


@dataclass(frozen=True)
class _Limit:
    """Of one synchronize()."""

    seconds: float
    at: float | None  # of time.monotonic(); None: there is none


_NEVER = _Limit(0.0, None)


class Reducer:
    """Reduces gradients window by window.

    A window begins with the first gradient that is sent. It closes at step(), when every gradient
    has been sent, if only as "nothing here", and the closing word has been said. What arrives later
    is sent in one more window before the same step() goes on; the word lets all ranks know.
    """

    def __init__(self, settings: Settings, passes: int, mean: bool) -> None:
        """`passes`: arrivals of a gradient before it is sent; `mean`: divide it by their number."""
        self._settings = settings
        self.averages = settings.reduce_op == Average
        self.passes = passes
        self.mean = mean
        self.gradients: list[Gradient] = []
        self._unhooked: list[Gradient] = []
        self.open = False  # a window has begun
        self.sent: list[Gradient] = []  # in it
        self._taken: dict[int, Gradient] = {}  # whose memory begins where, but for fresh ones
        self.regular = True  # each of them once, with what it had
        self.quick = False  # what arrives is sent at once, and unchanged
        self.again = False  # gradients arrived after they were sent
        self.settled = False  # nothing has arrived since the last synchronize()
        self.holding = False  # no_sync(): gradients stay local
        self.in_buckets = False  # gradients lie in memory in which they are reduced
        self.turn = 0  # step() calls
        self.factor = 1.0  # of gradients, before they are sent
        self.counted = Passes()
        self._lock = threading.RLock()  # of synchronize()
        self.thread: int | None = None  # that steps; another one may be in a backward pass
        self._epoch = 0  # of the handles in the window
        self._handles: Any = []  # of the window, as the core takes them, once it is closed
        self._closed = False
        self._intact = False  # nothing has been reset when it was closed, a moment ago
        self._dropping = False  # closed without use for its gradients
        self._promised = False  # a synchronize() has not come to its end
        self._start()

    def _start(self) -> None:
        """Names the scope; once more after shutdown() and init()."""
        self._generation = requests.generation()
        key = (self._generation, self._settings.process_set)
        self.scope = f"optimizer.{_scopes[key]}"
        _scopes[key] += 1
        self._word: ClosingWord | None = None
        self._unfinished: list[int] = []  # of a window that failed, but all ranks send to the end
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
        wire = f"{self.scope}.{name}"
        call = Call(Op.ALLREDUCE, wire, s.process_set, s.reduce_op, s.prescale, s.postscale)
        group, members = s.groups.get(id(parameter), (None, 1))
        label = None if group is None else f"{self.scope}.group.{group}"
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
        self.holding = holding
        self._choose()

    def weigh(self, factor: float) -> None:
        """Gradients are multiplied by `factor` before they are sent."""
        self.factor = factor
        self._choose()

    def _choose(self) -> None:
        plain = self.passes == 1 and self.factor == 1.0 and not self.mean
        self.quick = self.open and plain and not self.holding

    @property
    def divisor(self) -> int:
        """What makes the sum of this step's backward passes their mean, if that is wanted."""
        return max(1, self.counted.seen) if self.mean else 1

    def scale(self, grad: Tensor) -> None:
        """Weighs this rank's gradient; makes a sum over backward passes their mean."""
        factor = self.factor / self.divisor
        if factor != 1.0:
            with torch.no_grad():
                grad.mul_(factor)

    def refuse(self, gradient: Gradient, reason: Exception) -> Exception:
        """This rank can't send a gradient: ends the window on all ranks. Gives the error to raise.

        Nobody waits for what this rank has not sent: the names are free for the next window.
        """
        reason = type(reason)(f"the gradient of {gradient.name}: {reason}")
        for other in self.gradients:
            if other.handle is None and other.wanted():
                other.encoding.refuse(reason)
        assert self._word is not None
        self._word.refuse(reason)
        self._fail()
        return reason

    def take(self, address: int, gradient: Gradient) -> None:
        """The window reduces what begins there. Raises RuntimeError for the same memory twice."""
        other = self._taken.setdefault(address, gradient)
        if other is not gradient and address not in (0, EMPTY):
            raise RuntimeError(twins_text(gradient.name, other.name))

    # ---- windows

    def begin(self) -> None:
        """The first gradient of a window is about to be sent."""
        if self._generation != requests.generation():
            self._start()
            for gradient in self.gradients:
                gradient.encoding = self._encoding(gradient.parameter, gradient.name)
            if self.in_buckets:  # what an earlier job has left unfinished is shared no more
                self.lay_out()
        if self._word is None:
            self._word = ClosingWord(self.scope, self._settings.process_set)
        for handle in self._unfinished:  # or their names would still be in use
            wait_until([handle], None)
        self._unfinished = []
        self._epoch = leases.epoch()
        self.open = True
        self._choose()
        ownership.opened(self)

    def synchronize(self, timeout: float | None = None, once: bool = False) -> None:
        """Blocks until `.grad` of all parameters is reduced: equal on all ranks.

        `once`: unless that has been done since the last arrival. One thread at a time. Raises
        StallError after `timeout` seconds. Then, and after an exception of a signal handler,
        the window stays as it is, and this rank's word is given: it has to come here again before
        anything else happens to the gradients.
        """
        limit = _NEVER if timeout is None else _Limit(timeout, monotonic() + timeout)
        with self._lock:
            if once:
                self.thread = threading.get_ident()
                if self.settled:
                    return
            if self._dropping:  # a zero_grad() has not come to its end
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
        self.counted.count_anew()
        if not self.averages:  # an average of averages is itself
            for gradient in self.gradients:
                gradient.delivered.stepped()

    def check_not_promised(self) -> None:
        """Raises RuntimeError if a synchronize() has passed its time and was not called again."""
        if self._promised and not self._dropping:
            raise RuntimeError(
                "the last step() or synchronize() did not come to its end (its timeout has passed, "
                "or a signal came): call it again before the next backward() or zero_grad()"
            )

    def drop(self) -> None:
        """Ends the window: gradients have been reset, its results are of no use.

        Those that are not reset and were sent after the others had been (by the backward pass that
        is running) stay, reduced.
        """
        self.check_not_promised()
        carried = 0 if self._closed else sum(g.is_current() for g in self.gradients)
        self._finish(keep=False, carried=carried)

    def reset(self) -> None:
        """zero_grad(): nothing may be under way, and counting begins anew."""
        self.check_not_promised()
        self.thread = threading.get_ident()
        if self.open:
            self._finish(keep=False)
        for gradient in self.gradients:
            gradient.restore()
        self._count_anew()
        self.counted.count_anew()
        self.turn += 1
        self.settled = False
        self.hook()

    def close(self, keep: bool, carried: int = 0) -> None:
        """Sends what the window lacks and says the closing word; does not wait."""
        if self._closed:
            return
        if not self.open:
            self.begin()
        self.hook()
        tardy = sparse = 0
        if not self.regular or len(self.sent) < len(self.gradients):
            tardy, sparse = self._send_rest(keep)
        joins = requests.joins(self._settings.process_set)
        if joins != self._joins:  # who has joined early has made fewer steps
            self._joins, self._steps = joins, 0
        assert self._word is not None
        if self._word.handle is None:
            gone = [g for g in self.sent if g.parameter.grad is not g.shown] if keep else []
            reset = hash(tuple(sorted(self.gradients.index(g) for g in gone))) >> 8 if gone else 0
            divided = fingerprint(self.divisor, (g.divisors() for g in self.gradients if self.mean))
            equal = self._steps, len(self.sent), carried, divided, reset
            self._word.send(Statement(tardy, int(not keep), sparse, *equal))
            self._intact = keep and not gone
        handles = [g.handle for g in self.sent if g.handle is not None]
        self._handles = leases.numbers_of(handles)
        self._dropping, self._closed = not keep, True

    def _send_rest(self, keep: bool) -> tuple[int, int]:
        """What a Statement says of late and of sparse gradients."""
        tardy = sparse = 0
        for number, gradient in enumerate(self.gradients):
            if gradient.handle is None and gradient.wanted():
                gradient.send_rest(keep)
            tardy += gradient.late is not None
            if gradient.sparse_dim:
                sparse = (number << 8) + gradient.sparse_dim
        return tardy, sparse

    def _finish(self, keep: bool, carried: int = 0, limit: _Limit = _NEVER) -> None:
        for other in ownership.others(self, threading.get_ident()):
            other.close(keep=True)
        before = self._closed
        self.close(keep, carried)
        intact = self._intact and not before
        self._promised = True  # until it is over: the handler of a signal may raise anywhere
        assert self._word is not None
        self._wait([] if self._word.handle is None else [self._word.handle], limit)
        try:
            said = self._word.said(keep)
        except MismatchError:
            self.abandon()
            raise
        self._wait(self._handles, limit)
        if cuda.in_use():
            cuda.join(self._handles, self.sent)
        self.again = said.late > 0 or said.sparse > 0
        with torch.no_grad():
            divisor = self.divisor
            unsettled = [g for g in self.sent if g.handle is not None]
            settled = [g.settle(keep, divisor, intact) for g in unsettled]
        if said.sparse:  # one of them; the next window is about the others
            self.gradients[said.sparse >> 8].gather(said.sparse & 0xFF)
        handles, complaints = self._handles, [text for text in settled if text is not None]
        if not keep:
            self.counted.count_anew()
        self._end_window()
        leases.end(handles)
        if complaints and keep:
            raise RuntimeError(complaints[0])

    def _wait(self, handles: Any, limit: _Limit) -> None:
        """Raises StallError, and keeps the window; or what has failed, and gives it up."""
        code = wait_until(handles, limit.at)
        if code == lib.FARANDOLE_OK:
            return
        if code == lib.FARANDOLE_PENDING:
            word = None if self._word is None else self._word.handle
            raise late(self.scope, self.sent, word, limit.seconds)
        failure = error(code)
        self._fail()
        raise failure

    def _fail(self) -> None:
        """Abandons a window that a rank has failed in: all others complete it."""
        self._unfinished = [g.handle for g in self.sent if g.handle is not None]
        self.abandon()

    def abandon(self) -> None:
        """Ends the window without its results, which will never come or are of no use."""
        handles = [g.handle for g in self.sent if g.handle is not None]
        if self._word is not None and self._word.handle is not None:
            handles.append(self._word.handle)
            self._word.handle = None
        leases.drop(handles, self._epoch)
        for gradient in self.sent:
            gradient.forget()
        self.counted.count_anew()
        self.settled = False
        self._end_window()

    def _end_window(self) -> None:
        self.open = self._closed = self._dropping = self._promised = self.quick = False
        self.sent, self._handles, self.regular = [], [], True
        self._taken.clear()
        ownership.ended(self)
        self._count_anew()

    def _count_anew(self) -> None:
        if self.passes > 1:
            for gradient in self.gradients:
                gradient.left = self.passes

    def set_passes(self, passes: int) -> None:
        """Changes the number of arrivals before a gradient is sent, from the next window on."""
        self.passes = passes
        self._choose()
        for gradient in self.gradients:
            gradient.left = passes
