# SPDX-License-Identifier: Apache-2.0
"""How a Gradient is sent by a compressor with error feedback. Takes the place of the Gradient's
Encoding; on autograd's threads and the one that steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.calls import leases
from farandole.calls.handles import is_absent
from farandole.calls.requests import Call, Op, refuse, submit
from farandole.members import members_of
from farandole.ops import Average, ReduceOp
from farandole.topology import rank
from farandole.torch.feedback.compressor import RESIDUAL, Ask, FeedbackCompressor, State, Steps
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.rows import Rows
from farandole.torch.kind import describe, receive

if TYPE_CHECKING:
    from farandole.calls.rounds import Round
    from farandole.torch.gradients.gradient import Gradient


class Feedback:
    """As an Encoding, of which one gradient takes a compressor's calls, one after another.

    The first is submitted when the gradient arrives, each next one when its predecessor is done on
    all ranks. State is kept when a result is delivered: a round that is dropped or fails, or whose
    result is not finite, leaves it as it was.
    """

    weight = stream = 0  # as in Encoding
    grouped = False

    def __init__(
        self, call: Call, compressor: FeedbackCompressor, state: State, parameter: Tensor
    ) -> None:
        """`call` is that of the plain form; `state` is what is kept, changed in place."""
        self._call = call
        self._compressor = compressor
        self._state = state
        self._like = parameter
        members = members_of(call.process_set)
        self._ranks, self._rank = len(members), members.index(rank())
        self._factor = call.prescale * call.postscale
        if call.reduce_op == Average:
            self._factor /= self._ranks
        self._steps: Steps | None = None  # the compressor's generator; None: to be run again
        self._ask: Ask
        self._tensor: Tensor | None = None  # what is reduced
        self._present = False  # this rank has a gradient
        self._calls = 0  # submitted in this round
        self._done: list[Tensor] = []  # their results
        self._nobody = False  # no rank has a gradient
        self._outcome: tuple[Tensor, Tensor] | None = None
        self._next: State = {}  # the state after this round

    # ---- sending

    def refuse(self, reason: Exception) -> None:
        """As in Encoding."""
        self._calls = 0
        self.refuse_rest(reason)

    def refuse_rest(self, reason: Exception) -> None:
        """Tells the peers that this rank can't make the next call, and why."""
        refuse(self._named(Op.ALLREDUCE), reason)

    def carries(self, _grad: Tensor) -> bool:
        """False: no gradient is sent unchanged."""
        return False

    def encode(self, grad: Tensor) -> Tensor:
        """The tensor that is sent first."""
        if grad.layout is not torch.strided or not grad.is_floating_point():
            raise ValueError(
                f"{self._compressor!r} takes dense floating-point gradients, not {grad.layout} of "
                f"{grad.dtype}: let compression= choose Compression.none for this parameter"
            )
        return self._begin(grad)

    def receive(self, parameter: Tensor) -> Tensor:
        """The tensor in which this rank gets the first result, though it sends nothing."""
        self._like = parameter
        return self._begin(None)

    def submit(
        self, input: int, _output: int, _memory: object, made: list[int] | None = None
    ) -> int:
        """Submits the next call; `input` 0: without this rank's part. Returns its handle."""
        op, tensor = self._ask
        call, whole = self._named(op), describe(tensor, in_place=True)
        if op is Op.ALLREDUCE:
            source = whole if input else replace(whole, pointer=0)
            numbers = submit(call, [source], [whole])
        else:
            if op is Op.ALLTOALL:
                call = replace(call, splits=(int(input != 0),) * self._ranks)
            numbers = submit(call, [whole if input else describe(tensor[:0])])
        self._calls += 1
        if made is not None:
            made.append(int(numbers[0]))
        return int(numbers[0])

    def _named(self, op: Op) -> Call:
        name = f"{self._call.name}.{1 + self._calls}"
        return replace(
            self._call, op=op, name=name, reduce_op=ReduceOp.SUM, prescale=1.0, postscale=1.0
        )

    def _begin(self, grad: Tensor | None) -> Tensor:
        """Runs the compressor up to its first call, on zeros if there is no gradient."""
        like = self._like if grad is None else grad
        kind = torch.float64 if like.dtype is torch.float64 else torch.float32
        own = torch.zeros(like.shape, dtype=kind, device=like.device)
        self._present = grad is not None
        if grad is not None:
            own += grad.detach()
            residual = self._state.get(RESIDUAL)
            if residual is not None and residual.shape == own.shape:
                own += residual.to(own.device)
        self._tensor, self._outcome, self._nobody = own, None, False
        self._calls, self._done = 0, []
        return self._run()

    def _run(self) -> Tensor:
        """Runs the compressor to its next call, or to its end; from its beginning if need be."""
        steps, self._steps = self._steps if self._done else None, None
        try:
            if steps is not None:
                self._ask = steps.send(self._done[-1])
            else:
                steps, self._next = self._fresh()
                self._ask = next(steps)
                for result in self._done:
                    self._ask = steps.send(result)
            self._steps = steps
        except StopIteration as end:
            self._outcome = end.value
        except Exception as reason:
            text = f"{self._compressor!r}: {type(reason).__name__}: {reason}"
            raise RuntimeError(text) from reason
        return self._ask.tensor

    def _fresh(self) -> tuple[Steps, State]:
        own = self._tensor
        assert own is not None
        kept = {key: x.to(own.device) for key, x in self._state.items() if key != RESIDUAL}
        return self._compressor.reduce(own, kept, self._ranks, self._rank), kept

    # ---- going on

    @property
    def unfinished(self) -> bool:
        """Whether further calls, or the end of the compressor, follow the one under way."""
        return self._outcome is None and not self._nobody

    def proceed(self, handle: int) -> int:
        """Goes on after a call that is done. Returns the next call's handle, or the same one."""
        if len(self._done) == self._calls:  # a signal's exception has interrupted this
            self._steps = None
        else:
            result = self._result(handle)
            if not self._done and self._absent(handle, result):
                self._nobody = True
                return handle
            self._done.append(result)
        self._run()
        if self._outcome is not None:
            return handle
        number = self.submit(1, 0, None)
        leases.end([handle])
        return number

    def _result(self, handle: int) -> Tensor:
        op, tensor = self._ask
        return tensor if op is Op.ALLREDUCE else receive(handle, tensor)

    def _absent(self, handle: int, result: Tensor) -> bool:
        return is_absent(handle) if self._ask.op is Op.ALLREDUCE else len(result) == 0

    # ---- the end

    def missing(self, _handle: int) -> bool:
        """Whether no rank has a gradient."""
        return self._nobody

    def commit(self) -> None:
        """Keeps the state from now on, if the result is finite. May be called again."""
        if self._outcome is not None and bool(torch.isfinite(self._reduced()).all()):
            if self._present and self._tensor is not None:
                self._next[RESIDUAL] = self._tensor - self._outcome[1]
            self._state.update(self._next)

    def decode(self, _wire: Tensor, _handle: int) -> Tensor:
        """The sum or average, of the gradient's dtype."""
        return self._reduced()

    def end(self) -> None:
        """Frees the memory of a round."""
        self._steps = self._outcome = self._tensor = None
        self._done, self._next = [], {}

    def _reduced(self) -> Tensor:
        assert self._outcome is not None
        return (self._outcome[0] * self._factor).to(self._like.dtype)


Sending = Encoding | Rows | Feedback  # how a Gradient is sent


def go_on(current: Round[Gradient]) -> tuple[Exception | None, bool]:
    """Makes the next calls of gradients that take several, once all calls under way are done.

    Returns an error, after telling the peers, and whether calls are under way.
    """
    pairs = [(g, g.encoding) for g in current.sent if isinstance(g.encoding, Feedback)]
    rest = [(gradient, encoding) for gradient, encoding in pairs if encoding.unfinished]
    for i, (gradient, encoding) in enumerate(rest):
        try:
            gradient.handle = encoding.proceed(gradient.handle or 0)
        except Exception as reason:
            for _, other in rest[i:]:
                other.refuse_rest(reason)
            return reason, False
    current.renew()
    return None, bool(rest)


def release(gradients: Iterable[Gradient]) -> None:
    """Frees what a round has needed beside the state."""
    for gradient in gradients:
        if isinstance(gradient.encoding, Feedback):
            gradient.encoding.end()


def commit(gradients: Iterable[Gradient]) -> None:
    """Keeps the state after a round."""
    for gradient in gradients:
        if isinstance(gradient.encoding, Feedback):
            gradient.encoding.commit()
