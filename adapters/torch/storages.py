# SPDX-License-Identifier: Apache-2.0
"""Keeps torch from freeing or moving the memory of storages that the core uses. For kind.py.

A lease keeps a storage alive, but torch can still free or move its memory. guard() wraps torch's
methods that do so; they raise while the core reads or writes there. Any thread may call them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from farandole._library import ffi
from farandole.arrays.buffers import Buffer
from farandole.calls import leases
from farandole.calls.handles import explanation
from farandole.errors import of_signal


def _addresses(memory: object) -> Iterator[int]:
    """The address of one byte of each tensor in lent memory."""
    if isinstance(memory, (tuple, list)):
        for part in memory:
            yield from _addresses(part)
    elif isinstance(memory, Buffer):
        yield memory.pointer
    elif isinstance(memory, torch.UntypedStorage):
        yield memory.data_ptr()
    elif isinstance(memory, ffi.CData):
        yield int(ffi.cast("uintptr_t", memory))


def _check(x: Any, storage_of: Callable[[Any], torch.UntypedStorage], method: str) -> None:
    if not leases.in_flight():
        return
    try:
        storage = storage_of(x)  # a gradient that is being reduced waits for that
        begin = 0 if storage.device.type == "meta" else storage.data_ptr()
    except RuntimeError as reason:  # sparse, or another that has no memory of its own
        if of_signal(reason):
            raise
        return
    end = begin and begin + storage.nbytes()
    for number, memory in leases.in_flight():
        if any(begin <= address < end for address in _addresses(memory)):
            raise RuntimeError(
                f"{method}() would free or move memory that a collective call reads or writes: "
                f"wait for its handle first, or send a copy; {explanation([number])}"
            )


def guard() -> None:
    """Wraps torch's methods with the check. Importing farandole.torch.kind calls this once."""
    for method in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_"):
        _guard(torch.UntypedStorage, method, lambda storage: storage)
    for method in ("resize_", "resize_as_"):
        _guard(Tensor, method, Tensor.untyped_storage)


def _guard(class_: Any, method: str, storage_of: Callable[[Any], torch.UntypedStorage]) -> None:
    move = getattr(class_, method)

    @functools.wraps(move)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check(self, storage_of, method)
        return move(self, *args, **kwargs)

    setattr(class_, method, guarded)
