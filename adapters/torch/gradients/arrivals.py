# SPDX-License-Identifier: Apache-2.0
"""How gradients arrive: hooks around autograd tell when, and those that arrive together are
sent by one call, at a third of the cost of single calls. For the Reducer; on autograd's threads and
the user's, under a lock of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.calls.leases import lend_prepared, numbers_of
from farandole.torch.gradients.aliases import has_own_memory, have_own_memory
from farandole.torch.gradients.passes import at_end_of_pass

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Reducer

_ROOM = 64 << 10  # most bytes that wait
_EACH = 2 << 10  # bytes added per gradient, so that at most 32 wait
_grad, _fresh = attrgetter("unsent"), attrgetter("fresh")
_number = attrgetter("encoding.number")


class AccumulationHooks:
    """Calls `before()` and `after(parameter)` around each accumulation.

    The hook before it is on autograd's accumulation node, since hooks of the tensor itself also
    run under torch.autograd.grad, which accumulates nothing.
    """

    def __init__(
        self, parameter: Tensor, before: Callable[[Any], None], after: Callable[[Tensor], None]
    ) -> None:
        """The parameter must require a gradient."""
        self._parameter = parameter
        self._before = before
        self._follow()
        hook: Any = parameter.register_post_accumulate_grad_hook
        self._remove_after: Callable[[], None] = hook(after).remove

    def _follow(self) -> None:
        parameter: Any = self._parameter
        with torch.inference_mode(False), torch.enable_grad():
            self._node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        self._shape = parameter.shape
        self._remove_before: Callable[[], None] = self._node.register_prehook(self._before).remove

    def follow(self) -> None:
        """Hooks autograd's new node, after `p.data = x` of another dtype replaced the old one."""
        self._remove_before()
        self._node = None  # else autograd would keep using it, even for another shape
        self._follow()

    def check(self) -> None:
        """Calls follow() if `p.data = x` changed the shape, which autograd does not notice."""
        if self._parameter.shape != self._shape:
            self.follow()

    def remove(self) -> None:
        """Removes the hooks."""
        self._remove_before()
        self._remove_after()
        self._node = None


class Arrivals:
    """A reducer's unsent CPU gradients that need no change. Their `.grad` is a PendingGrad already.

    They wait for others of the same backward pass, while they are few and small. Code that reads
    what the round has sent calls send() first. Any thread of autograd's, or the user's.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._waiting: list[Gradient] = []
        self._room = _ROOM
        self._lock = threading.RLock()

    def put(self, gradient: Gradient, nbytes: int) -> None:
        """Adds a gradient with `unsent`, of that size, to be sent before the backward pass ends."""
        first = not self._waiting
        self._waiting.append(gradient)
        self._room -= nbytes + _EACH
        if self._room <= 0:
            self.send()
        elif first:
            try:
                at_end_of_pass(self.send)
            except RuntimeError:  # not in a backward pass of autograd's engine
                self.send()

    def send(self) -> None:
        """Sends all that wait. Raises the core's error; takes back those that it did not accept."""
        if not self._waiting:
            return
        with self._lock:
            gradients = self._waiting[:]
            self._room = _ROOM
            try:
                apart = self._send_plain(gradients) if self._reducer.quick else gradients
                for gradient in apart:
                    gradient.take_back()
                    gradient.arrived_alone()
            except BaseException:
                for gradient in gradients:
                    gradient.take_back()
                raise
            finally:
                del self._waiting[: len(gradients)]

    def take_back(self) -> None:
        """Makes each `.grad` this rank's gradient again, without sending any."""
        with self._lock:
            for gradient in self._waiting:
                gradient.take_back()
            self._waiting.clear()
            self._room = _ROOM

    def _send_plain(self, gradients: list[Gradient]) -> Iterable[Gradient]:
        """Sends those that can be sent as they are; returns the others."""
        grads = [*map(_grad, gradients)]
        try:
            storages = [*map(Tensor.untyped_storage, grads)]
            addresses = [*map(Tensor.data_ptr, grads)]
            plain = all(addresses) and all(map(Tensor.is_contiguous, grads))
        except RuntimeError:  # a tensor without memory of its own
            return gradients
        if not (plain and all(map(_fresh, gradients)) and have_own_memory(storages)):
            rows = zip(gradients, grads, storages, addresses, strict=True)
            chosen = {row[0]: row for row in rows if self._is_plain(*row)}
            apart = [g for g in gradients if g not in chosen]
            if apart:
                return [*apart, *self._send_plain([*chosen])] if chosen else apart
        self._submit(gradients, storages, addresses)
        return ()

    def _submit(
        self,
        gradients: list[Gradient],
        storages: list[torch.UntypedStorage],
        addresses: list[int],
    ) -> None:
        numbers = numbers_of([0] * len(gradients))
        try:
            lend_prepared([*map(_number, gradients)], addresses, numbers, storages)
        finally:
            for gradient, number in zip(gradients, numbers, strict=True):
                if number:
                    gradient.handle, gradient.wire, gradient.fresh = number, gradient.unsent, None
                    gradient.plain = gradient.sent_version is None and gradient.set_aside is None
                    self._reducer.round.sent.append(gradient)

    def _is_plain(
        self, gradient: Gradient, grad: Tensor, storage: torch.UntypedStorage, address: int
    ) -> bool:
        if not address or not grad.is_contiguous():
            return False
        if gradient.fresh:
            return has_own_memory(storage)
        try:  # the user may hold this tensor
            self._reducer.take(address, gradient)
        except RuntimeError:
            return False
        gradient.sent_version = grad._version
        return True
