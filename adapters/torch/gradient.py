# SPDX-License-Identifier: Apache-2.0
"""One parameter's gradient on its way through the reduction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.calls.handles import is_absent
from farandole.torch import cuda
from farandole.torch.accumulation import AccumulationHooks
from farandole.torch.aliases import apart, complaint_of, fitted, spoiled_text
from farandole.torch.bucket_view import Place
from farandole.torch.delivered import Delivered
from farandole.torch.encoding import Encoding
from farandole.torch.kind import address_of
from farandole.torch.pending import PendingGrad
from farandole.torch.rows import Rows

if TYPE_CHECKING:
    from farandole.torch.reducer import Reducer

__all__ = ["Gradient"]

_wire, _parameter = attrgetter("wire"), attrgetter("parameter")
_set_grad: Any = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]
_NOT_KEPT = 2  # references to a PendingGrad: the gradient's own, and the question's


class Gradient:
    """Reduces `.grad` in place, from the hook of its last accumulation until `settle`.

    Meanwhile `.grad` is a PendingGrad: neither the user nor autograd can touch memory that is
    being reduced. What arrives again is kept apart (`late`), and so is what was reduced before
    (`set_aside`): a sum would count it once per rank.
    """

    __slots__ = (
        *("__weakref__", "set_aside", "_base_divisor", "_divisor", "fresh", "_graphed"),
        *("_hooks", "pending", "sent_version", "shown", "_sum", "unsent", "absent"),
        *("delivered", "encoding", "handle", "input", "late", "left", "lost", "name"),
        *("parameter", "place", "plain", "reducer", "sparse_dim", "wire"),
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Encoding) -> None:
        """`name` is the parameter's, for error texts; `encoding` is how it travels."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding: Encoding | Rows = encoding
        self._hooks: AccumulationHooks | None = None
        self.place: Place | None = None  # where the gradient is to lie
        self.lost = False  # a newer optimizer reduces it
        self.left = reducer.passes.wanted  # arrivals until it is sent
        self.fresh: bool | None = None  # `.grad` was None before this accumulation; None: unknown
        self.handle: int | None = None  # of the core, in a round
        self.absent, self.sparse_dim = False, 0  # sent without a contribution; though sparse
        self.pending = PendingGrad(self)
        self.shown: Tensor | None = None  # what .grad is unless the user has changed it
        self.unsent: Tensor | None = None  # what .grad was when it was sent
        self.wire: Tensor | None = None  # on the wire; the result comes into it
        self.input: Tensor | None = None  # what is sent, where that is another tensor
        self.sent_version: int | None = None  # of the wire, where the user may have it at hand
        self.plain = False  # sent as it was, into memory of its own, with nothing set aside
        self.late: Tensor | None = None  # arrived again after it was sent
        self.set_aside: Tensor | None = None  # reduced before: the result is added to it
        self._sum: Tensor | None = None  # of base and result, until it is delivered
        self._graphed: Tensor | None = None  # a CUDA graph writes here, and nobody hears of it
        self._divisor = self._base_divisor = 1  # of what is sent, or was: see Passes
        self.delivered = Delivered()

    def lie_at(self, place: Place | None) -> None:
        """Where its results come from now on; None: where torch has put it."""
        self.place = place
        if isinstance(self.encoding, Encoding):
            self.encoding.lie_at(place)

    # ---- hooks

    def hook(self) -> None:
        """Begins to listen; the parameter requires a gradient."""
        self._hooks = AccumulationHooks(self.parameter, self.before, self.arrived)

    def unhook(self) -> None:
        """Listens no more, for good."""
        if self._hooks is not None:
            self._hooks.remove()
        self.lost = True

    def before(self, _gradients: Any) -> None:
        """Runs before autograd accumulates into `.grad`."""
        grad = self.parameter.grad
        if self.handle is None:
            if grad is None:  # a fresh start, or reset by the user
                self.set_aside = None
                self.fresh = True
                return
            if grad is self.pending:  # it waits to be sent
                self.reducer.arrivals.send()
                self.before(_gradients)
                return
            self.fresh = self.delivered.holds(grad, self.reducer.turn)
            if self.fresh:
                self.set_aside, self._base_divisor = grad, self._divisor
                self.parameter.grad = None
        elif grad is not self.shown:  # model.zero_grad(): a new round begins
            self.reducer.drop()
            self.fresh = self.parameter.grad is None
        else:
            self.reducer.round.check_not_promised()
            waiting = self.unsent if self.sparse_dim else self.late
            self.fresh = waiting is None
            self.shown = self.parameter.grad = waiting

    def arrived(self, parameter: Tensor) -> None:
        """Runs after autograd has accumulated into `.grad`."""
        reducer, nbytes = self.reducer, self.encoding.weight
        reducer.settled = False
        if nbytes and reducer.quick and self.handle is None and self.fresh is not None:
            grad = self.unsent = parameter.grad
            if self._show():
                reducer.arrivals.put(self, nbytes)
                return
            parameter.grad = grad
        self.arrived_alone()

    def arrived_alone(self) -> None:
        """The long way, for whatever is not sent as it is or together with others."""
        reducer, parameter = self.reducer, self.parameter
        fresh, self.fresh = self.fresh, None
        if fresh is None:  # the parameter has become another one for autograd: `p.data = x`
            assert self._hooks is not None
            self._hooks.follow()
        if fresh and parameter.grad is not None:
            parameter.grad = apart(parameter.grad)
        reducer.passes.note()
        if self.handle is not None:
            if self.sparse_dim:
                self.unsent = parameter.grad
            else:
                self.late = parameter.grad
            reducer.regular = self.plain = False
            self._show()
        elif not reducer.passes.holding:
            self.left -= 1
            if self.left <= 0 and parameter.grad is not None:
                self._send(parameter.grad)
        elif cuda.is_capturing(parameter):
            self._graphed = parameter.grad

    def _show(self) -> bool:
        """Makes `.grad` a PendingGrad. False: the parameter's form is another one than before."""
        try:
            self.parameter.grad = self.shown = self.pending
        except RuntimeError:
            self.encoding.weight = 0
            self.pending = self.shown = PendingGrad(self)
            self.parameter.grad = self.pending
            return False
        return True

    # ---- sending

    def _send(self, grad: Tensor) -> None:
        """Begins the reduction of `grad`, which is `.grad`."""
        reducer = self.reducer
        if not reducer.round.open:
            reducer.begin()
        if grad.layout is torch.strided and 0 in grad.stride() and grad.numel() > 1:
            grad = grad.contiguous()  # the user's, expanded: it has no memory for the result
        self._divisor = reducer.passes.divisor
        encoding = self.encoding
        try:
            if grad.layout is torch.strided:
                address_of(grad)  # whether it has memory
            reducer.passes.scale(grad)
            wire = encoding.encode(grad)
            target = 0 if wire is None else address_of(wire)
            if self.place is None:
                reducer.take(target, self)
        except (TypeError, ValueError, RuntimeError) as reason:
            raise reducer.refuse(self, reason) from None
        if wire is None:
            self._send_without(grad)
            return
        self.wire, self.unsent = wire, grad
        self.sent_version = wire._version if wire is grad else None
        if self.place is not None:
            target = self._send_to(self.place) or target
        sent = self.input if self.input is not None else self.wire
        memory = self.wire.untyped_storage(), sent.untyped_storage()
        self.handle = encoding.submit(address_of(sent), target, memory)
        reducer.round.sent.append(self)
        self.left = reducer.passes.wanted
        self._show()

    def _send_to(self, place: Place) -> int:
        """Lets the result come into its place, unless that holds what was reduced before.

        Gives the address where it comes, 0: where it would have come anyhow.
        """
        if self.set_aside is not None:
            self.set_aside = place.vacate(self.set_aside)
        grad = self.wire
        if grad is None or grad is not self.unsent or place.holds(grad) or grad is self._graphed:
            return 0
        if self.set_aside is place.tensor or not place.fits(grad):
            return 0
        tensor = place.ready(grad)
        if place.at == NOWHERE:  # torch makes the next gradient in the memory that is free then
            with torch.no_grad():
                tensor.copy_(grad)
            self.unsent = tensor
            self.sent_version = tensor._version
        else:
            self.input, self.sent_version = grad, None
        self.wire = tensor
        return place.pointer

    def send_rest(self, keep: bool) -> None:
        """Before a round closes: sends what has not been sent, or that there is nothing."""
        grad = self.parameter.grad
        if keep and grad is not None and not self.delivered.holds(grad, self.reducer.turn):
            self._send(grad)
            return
        self.shown = grad
        if keep:
            self.set_aside, self._base_divisor = grad, self._divisor
        self._send_nothing(keep)

    def _send_without(self, grad: Tensor) -> None:
        """Not all ranks know that it is sparse: it waits for the next round, where they do."""
        self.sparse_dim, self.unsent = grad.sparse_dim(), grad
        self._send_nothing(receive=True)
        self._show()

    def _send_nothing(self, receive: bool) -> None:
        self.absent = True
        output, memory = 0, None
        if receive:
            self.wire = memory = self.encoding.receive(self.parameter)
            output = address_of(self.wire)
        else:
            self.encoding.ensure(self.parameter)
        self.handle = self.encoding.submit(0, output, memory)
        self.reducer.round.sent.append(self)
        self.reducer.regular = False
        self.left = self.reducer.passes.wanted

    def gather(self, sparse_dim: int) -> None:
        """From now on it travels as rows, on all ranks."""
        if isinstance(self.encoding, Encoding):
            self.encoding = self.encoding.rows(self.parameter, sparse_dim)

    # ---- settling: each of these may run again where an exception of a signal handler ended it

    def settle(self, keep: bool) -> str | None:
        """Takes the finished result into `.grad`.

        Not `keep`: the round is dropped; what was reset or not sent stays as it is. Returns a
        complaint where somebody wrote into the gradient while it was reduced.
        """
        if self.plain and self.parameter.grad is self.wire:  # settle_plain() was interrupted
            self.parameter.grad = self.shown = self.pending
        complaint = self._settle(self.parameter.grad, keep)
        self._divisor = self.reducer.passes.divisor
        self._leave_round()
        return complaint

    def deliver(self, grad: Tensor) -> None:
        """`grad` has become `.grad`."""
        self.delivered.note(None if grad is self._graphed else grad, self.reducer.turn)
        self.shown = None
        if getrefcount(self.pending) > _NOT_KEPT:
            self.pending = self.pending.part_with(grad)

    def _settle_without(self, grad: Tensor | None) -> None:
        """It has waited; where it has been reset, there is nothing to wait for."""
        if grad is not self.shown:
            self.pending = self.pending.part_with(None)
            self.set_aside = None
            return
        self.parameter.grad = self.unsent
        if not is_absent(self.handle or 0):  # dense on other ranks
            self.set_aside = self._total()

    def _settle(self, grad: Tensor | None, keep: bool) -> str | None:
        if self.sparse_dim:
            self._settle_without(grad)
            return None
        if self.absent and not keep:
            return None
        if grad is not self.shown:  # reset, unless it is another tensor
            self.shown = None
            if getrefcount(self.pending) > _NOT_KEPT:  # the user has kept what was sent
                self.pending = self.pending.part_with(None if self.absent else self._total())
            self.set_aside = None
            return spoiled_text(self.name, "replaced") if grad is not None and keep else None
        complaint = complaint_of(self, self.reducer.round.sent)
        total = self._total()
        if self.late is not None:
            self.parameter.grad, self.set_aside = self.late, total
            self._base_divisor = self.reducer.passes.divisor
            self.delivered.note(None, self.reducer.turn)
            self.reducer.again = True
            return complaint
        if grad is not total:
            total, unfit = fitted(total, self.parameter, self.name)
            self.parameter.grad, complaint = total, unfit or complaint
        if total is not None:
            self.deliver(total)
        self.set_aside = None
        return complaint

    def _total(self) -> Tensor | None:
        """Base and result in their final form: in the base, else in the gradient that was sent."""
        base, place = self.set_aside, self.place
        nothing = self.absent and is_absent(self.handle or 0)
        if self._sum is None:
            divisor = self.reducer.passes.divisor
            in_step = self.delivered.turn == self.reducer.turn
            if base is not None and in_step and self._base_divisor != divisor:
                base = base * (self._base_divisor / divisor)
            if not nothing:
                assert self.wire is not None
                result = self.encoding.decode(self.wire, self.handle or 0)
                if self._divisor != divisor:
                    result = result * (self._divisor / divisor)
                base = result if base is None else base + result
            self._sum = base
        total, into = self._sum, self.set_aside
        if into is None and not (self.absent or self.late is not None or self.input is not None):
            into = self.unsent
        elif into is not None and place is not None and self.wire is place.tensor:
            into = place.tensor
        if total is None or into is None or total is into or into.layout is not total.layout:
            return total
        return into.copy_(total)

    def _leave_round(self) -> None:
        self.absent, self.sparse_dim = False, 0
        self.wire = self.unsent = self.input = self.late = self._sum = self.shown = None
        self.sent_version, self.handle, self.plain = None, None, False

    def forget(self) -> None:
        """Leaves the round without a result: the reduction has failed."""
        if self.place is not None and self.place.at == NOWHERE:
            self.lie_at(None)  # peers may still read and write there
        if self.parameter.grad is self.pending:
            self.parameter.grad = None
        self.pending = self.pending.part_with(None)
        self.set_aside = None
        self._leave_round()

    def restore(self) -> None:
        """What was set aside becomes `.grad` again, for zero_grad to reset."""
        if self._hooks is not None:
            self._hooks.check()
        if self.set_aside is not None:
            self.parameter.grad, self.set_aside = self.set_aside, None

    # ---- what others ask

    def wanted(self) -> bool:
        """Whether it is in every round. Raises RuntimeError if another optimizer reduces it."""
        if self.lost:
            text = "belongs to a newer DistributedOptimizer: one at a time may reduce it"
            raise RuntimeError(f"{self.name} {text}")
        return self.parameter.requires_grad or self.encoding.grouped

    def is_reset(self) -> bool:
        """Whether `.grad` is not what it was when this was sent."""
        return self.parameter.grad is not self.shown

    def divisors(self) -> tuple[int, int]:
        """Of what it has sent, and of what was reduced before in this step; 0: nothing."""
        base = self.set_aside is not None and self.delivered.turn == self.reducer.turn
        return 0 if self.absent else self._divisor, self._base_divisor if base else 0


def settle_plain(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Settles those that are `plain`, quickly; gives the others. Nobody may have reset any."""
    plain = [gradient for gradient in gradients if gradient.plain]
    wires = [*map(_wire, plain)]
    try:
        deque(map(_set_grad, map(_parameter, plain), wires), 0)
    except RuntimeError:  # a parameter has changed: `model.half()`, `p.data = x`
        return [*gradients]
    for gradient, wire in zip(plain, wires, strict=True):
        gradient.deliver(wire)
        gradient.plain = False
        gradient.handle = gradient.wire = gradient.unsent = None
    return [gradient for gradient in gradients if gradient.handle is not None]
