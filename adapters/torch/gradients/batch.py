# SPDX-License-Identifier: Apache-2.0
"""Gradients that arrive together are sent by one call, at a third of the cost of single calls; and
who else uses a gradient's memory. For the Reducer and its Gradients, on the threads that send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farandole.calls import leases

if TYPE_CHECKING:
    from farandole.torch.gradients.gradient import Gradient
    from farandole.torch.gradients.reducer import Reducer

_taken, _form = attrgetter("grad"), attrgetter("encoding.form")
_base: Any = getattr(torch._C, "TensorBase", None) or torch._C._TensorBase  # before torch 2.2
_dtype_of, _is_on_cpu = _base.dtype.__get__, _base.is_cpu.__get__
_users: Callable[[int], int] = torch._C._storage_Use_Count
_number_of = attrgetter("_cdata")
_ALONE = 2  # references to a storage that one tensor uses: the tensor's, and the caller's


def send_together(reducer: Reducer, batch: list[Gradient]) -> None:
    """Sends gradients that were taken; one by one if any can't be sent as it is."""
    grads = [*map(_taken, batch)]
    tensors, dtypes, numels = zip(*map(_form, batch), strict=True)
    storages = [*map(Tensor.untyped_storage, grads)]
    alike = (
        (*map(_dtype_of, grads),) == dtypes
        and (*map(Tensor.numel, grads),) == numels
        and all(map(_is_on_cpu, grads))
        and all(map(Tensor.is_contiguous, grads))
    )
    if not (alike and have_own_memory(storages)):
        for gradient in batch:
            if gradient.handle is None:
                gradient.send()
        return
    addresses = [*map(Tensor.data_ptr, grads)]
    try:
        claim(reducer, addresses, batch)
    except RuntimeError as reason:
        raise reducer.refuse(batch[0], reason) from None
    numbers = leases.numbers_of([0] * len(batch))
    try:
        leases.lend_prepared(tensors, addresses, numbers, storages)
    finally:
        for gradient, number in zip(batch, numbers, strict=True):
            gradient.handle = number or None
        reducer.round.sent += batch if all(numbers) else [g for g in batch if g.handle]


def have_own_memory(storages: Iterable[torch.UntypedStorage]) -> bool:
    """Whether one tensor alone uses each of them.

    If gradients pass only through views, torch lets those of several parameters, or the tensor
    that the user gave to backward(), share memory.
    """
    return set(map(_users, map(_number_of, storages))) <= {_ALONE}


def claim(reducer: Reducer, addresses: Sequence[int], gradients: Sequence[Gradient]) -> None:
    """Notes memory that the round reduces. Raises RuntimeError if two have the same."""
    before = len(reducer.memory)
    reducer.memory.update(addresses)
    if len(reducer.memory) == before + len(addresses):
        return
    taken = [(g, g.grad) for g in reducer.gradients if g.grad is not None and g.grad.numel()]
    places = [(g, x.data_ptr()) for g, x in taken if x.layout is torch.strided]
    for gradient, address in zip(gradients, addresses, strict=True):
        for other, place in places:
            if place == address and other is not gradient:
                raise RuntimeError(
                    f"{gradient.name} and {other.name} have their gradients in the same memory; "
                    "give each parameter a .grad of its own"
                )
