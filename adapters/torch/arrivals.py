# SPDX-License-Identifier: Apache-2.0
"""Gradients that have arrived and are sent together: it costs a third of sending them apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.calls.leases import lend_kept, numbers_of
from farandole.torch.aliases import has_own_memory, have_own_memory

if TYPE_CHECKING:
    from farandole.torch.gradient import Gradient
    from farandole.torch.reducer import Reducer

__all__ = ["Arrivals"]

_ROOM = 64 << 10  # bytes that wait at most
_EACH = 2 << 10  # bytes that a gradient counts as at least: at most 32 wait
_grad, _fresh = attrgetter("unsent"), attrgetter("fresh")
_number = attrgetter("encoding.number")
_at_end_of_pass: Callable[[Callable[[], None]], None]
_at_end_of_pass = torch.autograd.Variable._execution_engine.queue_callback


class Arrivals:
    """Those of one reducer, which go as they are, on the CPU. `.grad` is their PendingGrad already.

    They wait for others of the same backward pass, while they are few and small. Whatever looks at
    what the round has sent sends them first.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._waiting: list[Gradient] = []
        self._room = _ROOM
        self._lock = threading.RLock()

    def put(self, gradient: Gradient, nbytes: int) -> None:
        """It has `unsent`, of that size, to be sent before the backward pass ends."""
        first = not self._waiting
        self._waiting.append(gradient)
        self._room -= nbytes + _EACH
        if self._room <= 0:
            self.send()
        elif first:
            try:
                _at_end_of_pass(self.send)
            except RuntimeError:  # not in a backward pass of autograd's engine
                self.send()

    def send(self) -> None:
        """Sends all that wait. Raises the core's error; what it has not taken is this rank's."""
        if not self._waiting:
            return
        with self._lock:
            gradients = self._waiting[:]
            self._room = _ROOM
            try:
                apart = self._send_plain(gradients) if self._reducer.quick else gradients
                for gradient in apart:
                    _take_back(gradient)
                    gradient.arrived_alone()
            except BaseException:
                for gradient in gradients:
                    _take_back(gradient)
                raise
            finally:
                del self._waiting[: len(gradients)]

    def take_back(self) -> None:
        """Sends nothing: `.grad` is this rank's gradient again."""
        with self._lock:
            for gradient in self._waiting:
                _take_back(gradient)
            self._waiting.clear()
            self._room = _ROOM

    def _send_plain(self, gradients: list[Gradient]) -> Iterable[Gradient]:
        """Sends those that need nothing but that; gives the others."""
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
            lend_kept([*map(_number, gradients)], addresses, numbers, storages)
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
        try:  # the user may have it at hand
            self._reducer.take(address, gradient)
        except RuntimeError:
            return False
        gradient.sent_version = grad._version
        return True


def _take_back(gradient: Gradient) -> None:
    """If it waits to be sent: it does not any more."""
    if gradient.handle is None and gradient.unsent is not None:
        if gradient.parameter.grad is gradient.pending:
            gradient.parameter.grad = gradient.unsent
        gradient.unsent = gradient.shown = None
