# SPDX-License-Identifier: Apache-2.0
"""One parameter's gradient, from its hooks (autograd's threads) to the end of its reduction (the
thread that steps). Used by the Reducer only."""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.arrays.buffers import NOWHERE
from farandole.torch import cuda
from farandole.torch.feedback.encoding import Sending
from farandole.torch.grad_mode import without_grad
from farandole.torch.gradients.aliases import apart
from farandole.torch.gradients.arrivals import AccumulationHooks
from farandole.torch.gradients.bucket_view import BucketView
from farandole.torch.gradients.encoding import Encoding
from farandole.torch.gradients.passes import task_id
from farandole.torch.gradients.pending import Delivered, PendingGrad
from farandole.torch.gradients.resets import begin_task
from farandole.torch.kind import address_of

if TYPE_CHECKING:
    from farandole.torch.gradients.reducer import Reducer

# How a gradient is settled, and an error text.
Verdict = tuple[Callable[["Gradient"], "str | None"], "str | None"]
NOT_KEPT = 2  # references to a PendingGrad that only Gradient holds: its own, and getrefcount's


class Gradient:
    """Reduces `.grad` in place, from the hook of its last accumulation until `settle`.

    Meanwhile `.grad` is a PendingGrad: neither the user nor autograd can access memory that is
    being reduced. A gradient that arrives again is stored separately (`late`), and so is one that
    was reduced before (`set_aside`), since another sum would count it once per rank.
    """

    __slots__ = (
        *("__weakref__", "set_aside", "base_divisor", "divisor", "fresh", "graphed"),
        *("_hooks", "pending", "sent_version", "shown", "total", "unsent", "absent"),
        *("delivered", "encoding", "handle", "input", "late", "left", "lost", "name"),
        *("parameter", "view", "verdict", "plain", "reducer", "sparse_dim", "wire"),
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Sending) -> None:
        """`name` is the parameter's, for error texts; `encoding` is how it is sent."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding: Sending = encoding
        self._hooks: AccumulationHooks | None = None
        self.view: BucketView | None = None  # memory for the gradient; None: torch's own
        self.lost = False  # a newer optimizer reduces this parameter
        self.left = reducer.passes.wanted  # arrivals left until it is sent; 0 or less: none
        self.fresh: bool | None = None  # `.grad` was None before this accumulation; None: unknown
        self.handle: int | None = None  # the core's, while in a round
        self.absent, self.sparse_dim = False, 0  # sent without data; > 0: because it is sparse
        self.pending = PendingGrad(self)
        self.shown: Tensor | None = None  # .grad, unless the user has changed it
        self.unsent: Tensor | None = None  # .grad before it was sent
        self.wire: Tensor | None = None  # the tensor that is sent; receives the result
        self.input: Tensor | None = None  # the tensor that is sent, if the result goes elsewhere
        self.sent_version: int | None = None  # version of `wire`, if the user may hold that tensor
        self.plain = False  # sent unchanged, in its own memory, with nothing set aside
        self.late: Tensor | None = None  # gradient that arrived after this one was sent
        self.set_aside: Tensor | None = None  # earlier result, to which this one is added
        self.total: Tensor | None = None  # of set_aside and result, until it is delivered
        self.verdict: Verdict | None = None  # while it is being settled
        self.graphed: Tensor | None = None  # a CUDA graph writes here, without any hook
        self.divisor = self.base_divisor = 1  # of what is sent, and of set_aside: see Passes
        self.delivered = Delivered()

    def use_view(self, view: BucketView | None) -> None:
        """Sets the memory for results from now on; None: torch's own."""
        self.view = view
        if isinstance(self.encoding, Encoding):
            self.encoding.use_view(view)

    # ---- hooks

    def hook(self) -> None:
        """Installs the hooks; the parameter must require a gradient."""
        end = self.reducer.pass_end
        listener = self.arrived if end is None else end.awaited(self.arrived)
        self._hooks = AccumulationHooks(self.parameter, self.before, listener)

    def unhook(self) -> None:
        """Removes the hooks for good."""
        if self._hooks is not None:
            self._hooks.remove()
        self.lost = True

    def before(self, _gradients: Any) -> None:
        """Runs before autograd accumulates into `.grad`."""
        if task_id() != self.reducer.passes.task:
            begin_task(self.reducer)
        grad = self.parameter.grad
        if self.handle is None:
            if grad is None:  # no gradient yet, or reset by the user
                self.set_aside = None
                self.fresh = True
                return
            if grad is self.pending:  # it waits to be sent
                self.reducer.arrivals.send()
                self.before(_gradients)
                return
            self.fresh = self.delivered.holds(grad, self.reducer.turn)
            if self.fresh:
                self.set_aside, self.base_divisor = grad, self.divisor
                self.parameter.grad = None
        elif grad is not self.shown:  # model.zero_grad(): a new round begins
            self.reducer.drop()
            self.fresh = self.parameter.grad is None
        else:
            self.reducer.round.check_not_promised()
            self.shown = self.parameter.grad = self.unsent if self.sparse_dim else self.late
            self.fresh = self.shown is None

    def arrived(self, parameter: Tensor) -> None:
        """Runs after autograd has accumulated into `.grad`."""
        reducer, nbytes = self.reducer, self.encoding.weight
        reducer.settled, fresh = False, self.handle is None and self.fresh is not None
        if nbytes and reducer.quick and fresh and parameter.is_cpu:  # it may have moved
            grad = self.unsent = parameter.grad
            if self._show():
                reducer.arrivals.put(self, nbytes)
                return
            parameter.grad = grad
        self.arrived_alone()

    def arrived_alone(self) -> None:
        """As arrived(), for a gradient that needs changes or is sent alone."""
        reducer, parameter = self.reducer, self.parameter
        fresh, self.fresh = self.fresh, None
        if fresh is None:  # autograd has made a new node: `p.data = x`
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
            self.graphed = parameter.grad

    def _show(self) -> bool:
        """Makes `.grad` a PendingGrad. False: the parameter's form has changed."""
        try:
            self.parameter.grad = self.shown = self.pending
        except RuntimeError:
            self.encoding.weight = 0
            self.pending = self.shown = self.parameter.grad = PendingGrad(self)
            return False
        return True

    # ---- sending

    def _send(self, grad: Tensor) -> None:
        """Begins the reduction of `grad`, which is `.grad`."""
        reducer = self.reducer
        if not reducer.round.open:
            reducer.begin()
        if grad.layout is torch.strided and 0 in grad.stride() and grad.numel() > 1:
            grad = grad.contiguous()  # expanded by the user: has no memory for the result
        self.divisor = reducer.passes.divisor
        version = grad._version
        try:
            self._send_scaled(grad)
        except BaseException:  # perhaps of a signal handler: it will be sent again
            if self.handle is None:
                if grad._version != version:
                    reducer.passes.unscale(grad if self.unsent is None else self.unsent)
                self.take_back()
            raise

    def _send_scaled(self, grad: Tensor) -> None:
        reducer, encoding = self.reducer, self.encoding
        try:
            if grad.layout is torch.strided:
                address_of(grad)  # raises if it has no memory
            reducer.passes.scale(grad)
            wire = encoding.encode(grad)
            target = 0 if wire is None else address_of(wire)
            if self.view is None:
                reducer.take(target, self)
        except (TypeError, ValueError, RuntimeError) as reason:
            raise reducer.refuse(self, reason) from None
        if wire is None:
            self._send_without(grad)
            return
        self.wire, self.unsent = wire, grad
        self.sent_version = wire._version if wire is grad else None
        if self.view is not None:
            target = self._send_to(self.view) or target
        sent = self.input if self.input is not None else self.wire
        memory = self.wire.untyped_storage(), sent.untyped_storage()
        self._show()
        self._submit(address_of(sent), target, memory)

    def _submit(self, input: int, output: int, memory: object) -> None:
        """Hands it to the core, all or nothing, also if a signal handler raises meanwhile."""
        try:
            self.handle = self.encoding.submit(input, output, memory)
        except BaseException:
            self.handle = self.encoding.lost() or None
            raise
        finally:
            if self.handle is not None:
                self.reducer.round.sent.append(self)

    def take_back(self) -> None:
        """Makes `.grad` this rank's gradient again, if it has not been sent."""
        if self.handle is None and self.unsent is not None:
            if self.parameter.grad is self.pending:
                self.parameter.grad = self.unsent
            self.unsent = self.shown = None

    def _send_to(self, view: BucketView) -> int:
        """Directs the result to `view`, unless that holds an earlier result.

        Returns the result's address; 0: unchanged.
        """
        if self.set_aside is not None:
            self.set_aside = view.vacate(self.set_aside)
        grad = self.wire
        if grad is None or grad is not self.unsent or view.holds(grad) or grad is self.graphed:
            return 0
        if self.set_aside is view.tensor or not view.fits(grad):
            return 0
        tensor = view.ready(grad)
        if view.at == NOWHERE:  # on the CPU; frees torch's memory for the next gradient
            _copy(grad, tensor)
            self.unsent = tensor
            self.sent_version = tensor._version
        else:
            self.input, self.sent_version = grad, None
        self.wire = tensor
        return view.pointer

    def send_rest(self, keep: bool) -> None:
        """Sends the gradient, or that there is none, before a round closes."""
        grad = self.parameter.grad
        if keep and grad is not None and not self.delivered.holds(grad, self.reducer.turn):
            self._send(grad)
            return
        self.shown = grad
        if keep:
            self.set_aside, self.base_divisor = grad, self.divisor
        self._send_nothing(keep)

    def _send_without(self, grad: Tensor) -> None:
        """Sends no data, as other ranks may not know that it is sparse; the next round sends it."""
        self.sparse_dim, self.unsent = grad.sparse_dim(), grad
        self._send_nothing(receive=True)
        self._show()

    def _send_nothing(self, receive: bool) -> None:
        self.absent, self.divisor = True, self.reducer.passes.divisor
        prepare = self.encoding.receive if receive else self.encoding.ensure
        try:
            self.wire = prepare(self.parameter)
        except RuntimeError as reason:  # of a user's compressor
            raise self.reducer.refuse(self, reason) from None
        output = 0 if self.wire is None else address_of(self.wire)
        self.reducer.regular = False
        self._submit(0, output, self.wire)

    def gather(self, sparse_dim: int) -> None:
        """Sends it as gathered rows from now on, on all ranks."""
        if isinstance(self.encoding, Encoding):
            self.encoding = self.encoding.rows(self.parameter, sparse_dim)

    # ---- the end of the round

    def deliver(self, grad: Tensor) -> None:
        """Notes that `grad`, the result, has become `.grad`."""
        self.delivered.note(None if grad is self.graphed else grad, self.reducer.turn)
        self.shown = None
        if getrefcount(self.pending) > NOT_KEPT:
            self.pending = self.pending.part_with(grad)

    def leave_round(self) -> None:
        """Forgets what only the round needed."""
        self.absent, self.sparse_dim = False, 0
        self.wire = self.unsent = self.input = self.late = self.total = self.shown = None
        self.sent_version = self.handle = self.verdict = None
        self.plain = False

    def forget(self) -> None:
        """Leaves the round without a result, after a failure."""
        if self.view is not None and self.view.at == NOWHERE:
            self.use_view(None)  # peers may still read and write there
        if self.parameter.grad is self.pending:
            self.parameter.grad = None
        self.pending = self.pending.part_with(None)
        self.set_aside = None
        self.leave_round()

    def restore(self) -> None:
        """Makes set_aside `.grad` again, so that zero_grad resets it."""
        if self._hooks is not None:
            self._hooks.check()
        if self.set_aside is not None:
            self.parameter.grad, self.set_aside = self.set_aside, None

    # ---- questions of the Reducer

    def wanted(self) -> bool:
        """Whether rounds must include it. Raises RuntimeError if another optimizer reduces it."""
        if self.lost:
            text = "belongs to a newer DistributedOptimizer: one at a time may reduce it"
            raise RuntimeError(f"{self.name} {text}")
        grad = self.parameter.grad  # a frozen parameter with a gradient is stepped too
        own = grad is not None and not self.delivered.holds(grad, self.reducer.turn)
        return own or self.parameter.requires_grad or self.encoding.grouped

    def is_reset(self) -> bool:
        """Whether `.grad` was changed since this was sent."""
        return self.parameter.grad is not self.shown

    def has_sent(self) -> bool:
        """Whether it takes part in the round with a gradient of this rank."""
        return self.handle is not None and not self.absent

    def divisors(self) -> tuple[int, int]:
        """Divisors of what it has sent, and of what was reduced before in this step; 0: nothing."""
        base = self.set_aside is not None and self.delivered.turn == self.reducer.turn
        return 0 if self.absent else self.divisor, self.base_divisor if base else 0


@without_grad
def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
