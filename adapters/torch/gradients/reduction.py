# SPDX-License-Identifier: Apache-2.0
"""A reduction: what one backward pass has under way. Gradients that arrive together are sent by one
call, at a third of the cost of single calls. For the Reducer and its Gradients, on the threads that
send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.calls import leases

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Pass, Reducer

ROOM = 64 << 10  # most bytes that wait to be sent together; see Sending.weight

_taken, _form = attrgetter("grad"), attrgetter("encoding.form")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_dtype_of, _is_on_cpu = _base.dtype.__get__, _base.is_cpu.__get__
_users: Callable[[int], int] = torch._C._storage_Use_Count
_number_of = attrgetter("_cdata")
_ALONE = 2  # references to a storage that one tensor uses: the tensor's, and the caller's


class Reduction:
    """What a backward pass, or step() in its place, has under way in one round.

    Made at its start and dropped at its end, so that none finds what another has left.
    """

    __slots__ = (
        *("again", "at_step", "batch", "capturing", "inside", "late", "memory", "reducer", "room"),
        *("scale", "sending", "sparse"),
    )

    def __init__(self, reducer: Reducer, at_step: bool = False, again: bool = False) -> None:
        """`at_step`: step() has started it; `again`: one of several rounds of the same pass."""
        self.reducer = reducer
        self.at_step = at_step
        self.again = again
        self.inside: Callable[[], Pass | None] = lambda: None  # a weak reference, during a pass
        self.capturing = False  # the pass becomes part of a CUDA graph
        self.sending = False  # gradients that arrive are taken and sent
        self.scale = 1.0  # what this rank's gradients are multiplied by before they are sent
        self.late = False  # gradients have arrived after theirs had been sent
        self.sparse = 0  # as in RoundState
        self.batch: list[Gradient] = []  # of what was taken, to be sent together
        self.room = ROOM
        self.memory: set[int] = set()  # addresses of what is reduced in its own memory

    def send(self) -> None:
        """Sends what was taken and waits to be sent. Raises the core's error."""
        with self.reducer.lock:
            batch, self.batch, self.room = self.batch, [], ROOM
            if batch:
                self._send(batch)

    def _send(self, batch: list[Gradient]) -> None:
        """By one call; one by one if any can't be sent as it is."""
        grads = [*map(_taken, batch)]
        tensors, dtypes, numels = zip(*map(_form, batch), strict=True)
        try:
            storages = [*map(Tensor.untyped_storage, grads)]
        except NotImplementedError:  # a gradient is sparse, and its parameter's last one was not
            storages = []
        if not (
            storages
            and (*map(_dtype_of, grads),) == dtypes
            and (*map(Tensor.numel, grads),) == numels
            and all(map(_is_on_cpu, grads))
            and all(map(Tensor.is_contiguous, grads))
            and have_own_memory(storages)
            and self._note(addresses := [*map(Tensor.data_ptr, grads)])
        ):
            for gradient in batch:
                if gradient.handle is None:
                    gradient.send()
            return
        numbers = leases.numbers_of([0] * len(batch))
        note = map(setattr, compress(batch, numbers), repeat("handle"), filter(None, numbers))
        try:
            leases.lend_prepared(tensors, addresses, numbers, storages)
        finally:
            deque(note, 0)  # no signal is heard within it

    def _note(self, addresses: Sequence[int]) -> bool:
        """Notes memory that the round reduces; returns whether all of it is new."""
        before = len(self.memory)
        self.memory.update(addresses)
        return len(self.memory) == before + len(addresses)

    def claim(self, address: int, gradient: Gradient) -> None:
        """Notes memory that the round reduces. Raises RuntimeError if it is another's too."""
        if self._note([address]):
            return
        for other in self.reducer.gradients:
            x = other.grad
            if x is None or x.layout is not torch.strided or x.numel() == 0 or other is gradient:
                continue
            if x.data_ptr() == address:
                raise RuntimeError(
                    f"{gradient.name} and {other.name} have their gradients in the same memory; "
                    "give each parameter its own .grad"
                )


def have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether one tensor alone uses each of them.

    If gradients pass only through views, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share memory.
    """
    return set(map(_users, map(_number_of, storages))) <= {_ALONE}
