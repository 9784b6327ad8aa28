# SPDX-License-Identifier: Apache-2.0
"""One parameter's gradient on its way through the reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole._library import check_count
from farandole.buffers import EMPTY, NOWHERE
from farandole.handles import is_absent
from farandole.torch import cuda
from farandole.torch.bucket_view import Place
from farandole.torch.encoding import Encoding
from farandole.torch.rows import Rows

if TYPE_CHECKING:
    from farandole.torch.reducer import Reducer

__all__ = ["Gradient"]


class Gradient:
    """Reduces `.grad` in place, from the hook of its last accumulation until `settle`.

    Autograd must not write into memory that is being reduced, nor add to what is reduced already
    (a sum would count it once per rank). So just before an accumulation `before` sets such a tensor
    aside and lets autograd begin a new one, and `settle` adds the two.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_graphed",
        "_hooks",
        "_input",
        "_pointer",
        "_reduced",
        "_sent",
        "_shown",
        "_version",
        "absent",
        "encoding",
        "handle",
        "late",
        "left",
        "lost",
        "name",
        "parameter",
        "place",
        "reducer",
        "sparse_dim",
    )

    def __init__(self, reducer: Reducer, parameter: Tensor, name: str, encoding: Encoding) -> None:
        """`name` is the parameter's, for error texts; `encoding` is how it travels."""
        self.reducer = reducer
        self.parameter = parameter
        self.name = name
        self.encoding: Encoding | Rows = encoding
        self._hooks: list[Callable[[], None]] = []
        self.place: Place | None = None  # where the gradient is to lie
        self.lost = False  # a newer optimizer reduces it
        self.left = reducer.passes  # arrivals until it is sent
        self.handle: int | None = None  # of the core, while in a window
        self.absent = False  # sent without a contribution
        self.late = False  # arrived again after it was sent
        self.sparse_dim = 0  # not 0: sparse, and in the window without a contribution
        self._sent: Tensor | None = None  # on the wire; the result comes into it
        self._input: Tensor | None = None  # what is sent, where that is another tensor
        self._shown: Tensor | None = None  # what .grad is unless somebody else has changed it
        self._base: Tensor | None = None  # reduced before: the result is added to it
        self._graphed: Tensor | None = None  # a CUDA graph writes here, and nobody hears of it
        self._reduced = False  # .grad is the last result if it has this address and version:
        self._pointer = 0
        self._version = 0

    def lie_at(self, place: Place | None) -> None:
        """Where its results come from now on; None: where torch has put it."""
        self.place = place
        if isinstance(self.encoding, Encoding):
            self.encoding.lie_at(place)

    # ---- hooks

    def hook(self) -> None:
        """Begins to listen; the parameter requires a gradient."""
        parameter = self.parameter
        before: Any = parameter.register_hook
        after: Any = parameter.register_post_accumulate_grad_hook
        self._hooks = [before(self.before).remove, after(self.arrived).remove]

    def unhook(self) -> None:
        """Listens no more, for good."""
        while self._hooks:
            self._hooks.pop()()
        self.lost = True

    def before(self, _gradient: Tensor) -> None:
        """Runs before autograd accumulates into `.grad`."""
        grad = self.parameter.grad
        if self.handle is None:
            if grad is None:  # a fresh start, or reset by the user
                self._base = None
            elif self._reduced and self._is_reduced(grad):
                self._base = grad
                self.parameter.grad = None
            self._reduced = False
        elif grad is not self._shown:  # model.zero_grad(): a new window begins
            self.reducer.drop()
        else:
            self.reducer.check_not_promised()
            if not self.late and not self.sparse_dim:
                self._shown = self.parameter.grad = None

    before.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning from pickle

    def arrived(self, parameter: Tensor) -> None:
        """Runs after autograd has accumulated into `.grad`."""
        reducer = self.reducer
        reducer.settled = False
        if reducer.quick and self.handle is None:
            encoding, grad = self.encoding, parameter.grad
            start = encoding.start
            if start is not None and grad is not None and encoding.carries(grad):
                self._pointer = pointer = grad.data_ptr() or EMPTY
                number = start(pointer, pointer)
                self.handle = number if number >= 0 else check_count(number)
                self._sent = self._shown = grad
                self._version = grad._version
                self._reduced = False
                reducer.sent.append(self)
                return
        self._arrived(reducer)

    def _arrived(self, reducer: Reducer) -> None:
        """The long way, for whatever is not sent at once and as it is."""
        if reducer.mean:
            reducer.count_pass()
        if self.handle is not None:
            self.late = not self.sparse_dim
            reducer.regular = False
            self._shown = self.parameter.grad
        elif not reducer.holding:
            self.left -= 1
            if self.left <= 0:
                self._send(self.parameter.grad)
        elif cuda.is_capturing(self.parameter):
            self._graphed = self.parameter.grad

    # ---- sending

    def _send(self, grad: Tensor | None) -> None:
        """Begins the reduction of `grad`, which is `.grad`."""
        if grad is None:
            return
        reducer = self.reducer
        if not reducer.open:
            reducer.begin()
        if reducer.mean or reducer.factor != 1.0:
            reducer.scale(grad)
        encoding = self.encoding
        wire = encoding.encode(grad)
        if wire is None:
            self._send_without(grad)
            return
        pointer = wire.data_ptr() or EMPTY
        self._sent, self._shown = wire, grad
        self._pointer, self._version = pointer, wire._version
        if self.place is not None:
            self._send_to(self.place)
        if self._input is None:  # it is reduced where its result comes
            pointer = self._pointer
        self.handle = encoding.submit(pointer, self._pointer)
        reducer.sent.append(self)
        self._reduced = False
        self.left = reducer.passes

    def _send_to(self, place: Place) -> None:
        """Lets the result come into its place, unless that holds what was reduced before."""
        if self._base is not None:
            self._base = place.vacate(self._base)
        grad = self._sent
        if grad is None or grad is not self._shown or place.holds(grad) or grad is self._graphed:
            return
        if self._base is place.tensor or not place.fits(grad):
            return
        tensor = place.ready(grad)
        if place.at == NOWHERE:  # torch makes the next gradient in the memory that is free then
            with torch.no_grad():
                tensor.copy_(grad)
            self.parameter.grad = self._shown = tensor
            self._version = tensor._version
        else:
            self._input = grad
        self._sent, self._pointer = tensor, place.pointer

    def send_rest(self, keep: bool) -> None:
        """Before a window closes: sends what has not been sent, or that there is nothing."""
        grad = self.parameter.grad
        if keep and grad is not None and not (self._reduced and self._is_reduced(grad)):
            self._send(grad)
            return
        self._shown = grad
        if keep:
            self._base = grad
        self._send_nothing(keep)

    def _send_without(self, grad: Tensor) -> None:
        """Not all ranks know that it is sparse: it waits for the next window, where they do."""
        self.sparse_dim, self._shown = grad.sparse_dim(), grad
        self._send_nothing(receive=True)

    def _send_nothing(self, receive: bool) -> None:
        self.absent = True
        output = 0
        if receive:
            self._sent = self.encoding.receive(self.parameter)
            output = self._sent.data_ptr() or EMPTY
        else:
            self.encoding.ensure(self.parameter)
        self.handle = self.encoding.submit(0, output)
        self.reducer.sent.append(self)
        self.reducer.regular = False
        self.left = self.reducer.passes

    def gather(self, sparse_dim: int) -> None:
        """From now on the gradient travels as rows, on all ranks."""
        if isinstance(self.encoding, Encoding):
            self.encoding = self.encoding.rows(self.parameter, sparse_dim)

    # ---- settling

    def settle(self, keep: bool) -> str | None:
        """Takes the finished result into `.grad`; the caller releases the handle afterwards.

        Not `keep`: the window is dropped; what was reset or not sent stays as it is. Returns a
        complaint where somebody wrote into the gradient while it was reduced.
        """
        grad, sent = self.parameter.grad, self._sent
        if grad is sent and sent is not None and self._base is None:  # the ordinary case
            self.handle = self._sent = self._shown = None
            self._reduced = grad is not self._graphed
            return self._complaint("changed") if sent._version != self._version else None
        complaint = None
        if self.sparse_dim:
            self._settle_without(grad)
        elif keep or not self.absent:
            complaint = self._settle_rest(grad, keep)
        self.absent = self.late = False
        self.handle = self._sent = self._shown = self._input = None
        return complaint

    def _settle_without(self, grad: Tensor | None) -> None:
        """It has waited; where it has been reset, there is nothing to wait for."""
        self.sparse_dim = 0
        if grad is not self._shown:
            self._base = None
        elif not is_absent(self.handle or 0):  # dense on other ranks
            self._base = self._total(self._base)

    def _settle_rest(self, grad: Tensor | None, keep: bool) -> str | None:
        """Nothing sent, set aside, encoded, arrived again, or reset."""
        base, self._base = self._base, None
        sent = self._input if self._input is not None else self._sent
        if sent is not None and sent is self._shown and sent._version != self._version:
            return self._complaint("changed")
        if grad is not self._shown:  # reset, unless it is another tensor
            return self._complaint("replaced") if grad is not None and keep else None
        total = base if self.absent and is_absent(self.handle or 0) else self._total(base)
        if self.late:
            self._base = total
            self.reducer.again = True
            return None
        if grad is not total:
            self.parameter.grad = total
        if total is not None:
            self._reduced = total is not self._graphed
            self._pointer, self._version = _address(total), total._version
        return None

    def _total(self, base: Tensor | None) -> Tensor:
        """The result in its final form: in the base, else in the gradient that was sent."""
        assert self._sent is not None
        result = self.encoding.decode(self._sent, self.handle or 0)
        if base is not None:
            if self.place is not None and result is self.place.tensor:
                return result.add_(base)
            return base.add_(result) if base.layout is result.layout else base + result
        into = None if self.absent or self.late or self._input is not None else self._shown
        if into is None or result is into or result.layout is not into.layout:
            return result
        return into.copy_(result)

    def forget(self) -> None:
        """Leaves the window without a result: the reduction has failed."""
        if self.place is not None and self.place.at == NOWHERE:
            self.lie_at(None)  # peers may still read and write there
        self.handle = self._sent = self._shown = self._base = self._input = None
        self.absent = self.late = False
        self.sparse_dim = 0

    def restore(self) -> None:
        """Puts what was set aside back into `.grad`, for zero_grad to reset."""
        if self._base is not None:
            self.parameter.grad, self._base = self._base, None

    # ---- what the reducer asks

    def wanted(self) -> bool:
        """Whether it is in every window. Raises RuntimeError if another optimizer reduces it."""
        if self.lost:
            raise RuntimeError(
                f"{self.name} belongs to a newer DistributedOptimizer: one at a time may reduce it"
            )
        return self.parameter.requires_grad or self.encoding.grouped

    def is_current(self) -> bool:
        """Whether `.grad` is what was sent in this window, not reset since."""
        grad = self.parameter.grad
        return self.handle is not None and grad is not None and grad is self._shown

    def keep_alive(self) -> tuple[Tensor | None, Tensor | None]:
        """The memory under reduction."""
        return self._sent, self._input

    def _is_reduced(self, grad: Tensor) -> bool:
        return grad._version == self._version and _address(grad) == self._pointer

    def _complaint(self, what: str) -> str:
        return (
            f"the gradient of {self.name} was {what} while it was being reduced: call "
            "optimizer.synchronize() before touching gradients between backward() and step() "
            "(to clip: optimizer.clip_grad_norm_(); to reset: optimizer.zero_grad())"
        )


def _address(grad: Tensor) -> int:
    """Of its memory; of a sparse gradient's values."""
    if grad.is_sparse:
        grad = grad._values()
    return grad.data_ptr() or EMPTY
