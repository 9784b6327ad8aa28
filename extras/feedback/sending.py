# SPDX-License-Identifier: Apache-2.0
"""How a Gradient is sent by a compressor with error feedback; on autograd's threads and the one
that steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from farandole import Average, Sum, rank
from farandole.extension import Call, Op, is_absent, leases, members_of, submit
from farandole.extras.feedback.compressor import RESIDUAL, Ask, FeedbackCompressor, State, Steps
from farandole.torch.extension import Sending, describe, of_signal, receive


class Feedback(Sending):
    """Sends one gradient by a compressor's calls, one after another.

    The first is submitted when the gradient arrives, each next one when its predecessor is done on
    all ranks. State is kept when a result is delivered: a round that is dropped or fails, or whose
    result is not finite, leaves it as it was.
    """

    adds = False

    def __init__(
        self, call: Call, compressor: FeedbackCompressor, state: State, parameter: Tensor
    ) -> None:
        """`call` is that of the plain form; `state` is what is kept, changed in place."""
        self._call = call
        self._compressor = compressor
        self._state = state
        self._like = parameter
        members = members_of(call.process_set)
        self._place = len(members), members.index(rank())
        self._steps: Steps | None = None  # the compressor's generator; None: to be run again
        self._ask: Ask
        self._tensor: Tensor | None = None  # what is reduced
        self._present = False  # this rank has a gradient
        self._epoch = leases.epoch()
        self._made: list[int] = []  # the handles of this round's calls, of this epoch
        self._done: list[Tensor] = []  # their results
        self._nobody = False  # no rank has a gradient
        self._outcome: tuple[Tensor, Tensor] | None = None
        self._next: State = {}  # the state after this round

    # ---- sending

    @property
    def call(self) -> Call:  # type: ignore[override]
        """The next one."""
        return self._named(Op.ALLREDUCE)

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

    def submit(self, input: int, _output: int, _memory: object, made: list[int]) -> int:
        """Submits the next call; `input` 0: without this rank's part. Returns its handle."""
        op, tensor = self._ask
        call, whole = self._named(op), describe(tensor, in_place=True)
        if op is Op.ALLREDUCE:
            sent, outputs = whole if input else replace(whole, pointer=0), [whole]
        else:
            if op is Op.ALLTOALL:
                call = replace(call, splits=(int(input != 0),) * self._place[0])
            sent, outputs = whole if input else describe(tensor[:0]), []
        numbers = leases.numbers_of([0])
        try:
            submit(call, [sent], outputs, numbers)
        finally:  # as in Gradient; Python hears signals after calls, and this makes none
            number: int = numbers[0]
            if number > 0:
                self._made = [*self._made, number]
                made += [number]
        return number

    def check_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError if a checkpoint's residual has a different shape than the parameter."""
        found = state.get(RESIDUAL)
        if found is not None and found.shape != self._like.shape:
            raise ValueError(
                f"the residual of {name} has shape {[*found.shape]}; the parameter's is "
                f"{[*self._like.shape]}"
            )

    def _named(self, op: Op) -> Call:
        name = f"{self._call.name}.{1 + len(self._made)}"
        return replace(self._call, op=op, name=name, reduce_op=Sum, prescale=1.0, postscale=1.0)

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
        self.end()  # a signal may have come before the last round's
        self._tensor, self._nobody = own, False
        return self._run()

    def _run(self) -> Tensor:
        """Runs the compressor to its next call, or to its end; from its start if need be."""
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
            if of_signal(reason):
                raise
            text = f"{self._compressor!r}: {type(reason).__name__}: {reason}"
            raise RuntimeError(text) from reason
        return self._ask.tensor

    def _fresh(self) -> tuple[Steps, State]:
        own = self._tensor
        assert own is not None
        kept = {key: x.to(own.device) for key, x in self._state.items() if key != RESIDUAL}
        return self._compressor.reduce(own, kept, *self._place), kept

    # ---- going on

    @property
    def unfinished(self) -> bool:  # type: ignore[override]
        """Whether another call, or the end of the compressor, follows the one under way."""
        return self._tensor is not None and self._outcome is None and not self._nobody

    def latest(self, handle: int) -> int:
        """The handle of the last call made, which a signal may have kept from the Reducer."""
        return self._made[-1] if self._made else handle

    def proceed(self, handle: int) -> int:
        """Goes on after a call that is done. Returns the next call's handle, or the same one."""
        if handle != self._made[-1]:  # a signal has interrupted this
            return self._made[-1]
        if len(self._done) == len(self._made):  # so here
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
        return self.submit(1, 0, None, [])

    def _result(self, handle: int) -> Tensor:
        op, tensor = self._ask
        return tensor if op is Op.ALLREDUCE else receive(handle, tensor)

    def _absent(self, handle: int, result: Tensor) -> bool:
        return is_absent(handle) if self._ask.op is Op.ALLREDUCE else len(result) == 0

    # ---- the end

    def missing(self, _handle: int) -> bool:
        """Whether no rank had a gradient."""
        return self._nobody

    def decode(self, _wire: Tensor, _handle: int) -> Tensor:
        """The sum or average, of the gradient's dtype. Keeps the state, if it is finite."""
        assert self._outcome is not None
        assert self._tensor is not None
        total, sent = self._outcome
        factor = self._call.prescale * self._call.postscale
        if self._call.reduce_op == Average:
            factor /= self._place[0]
        result = (total * factor).to(self._like.dtype)
        if bool(torch.isfinite(result).all()):
            if self._present:
                self._next[RESIDUAL] = self._tensor - sent
            self._state.update(self._next)
        return result

    def end(self) -> None:
        """Frees what the round has needed. The Reducer ends the last call only."""
        leases.drop(self._made[:-1], self._epoch)
        self._steps = self._outcome = self._tensor = None
        self._made, self._done, self._next = [], [], {}
