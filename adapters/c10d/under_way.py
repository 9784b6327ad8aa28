# SPDX-License-Identifier: Apache-2.0
"""Calls of torch.distributed that may not have ended, and the memory that they use. Any thread.

torch's backends carry out the calls of a group in order. So a program may start a call on a tensor
that an earlier one still reads or writes, and wait for both later. The core would refuse the second
call; here it waits for the first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole._library import lib

if TYPE_CHECKING:
    from farandole.c10d.work import GroupWork

Ranges = list[tuple[int, int]]  # first and last address, plus one

_MANY = 256
_works: dict[int, tuple[GroupWork, Ranges, Ranges]] = {}  # by id: memory it reads, and writes


def wait_for_users(reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Waits for earlier calls that must end before one that reads and writes these tensors starts.

    Each of them raises its error in its own wait().
    """
    if not _works:
        return
    read, written = _ranges(reads), _ranges(writes)
    for work, its_read, its_written in list(_works.values()):
        if _meet(its_written, [*read, *written]) or _meet(its_read, written):
            work.outcome()


def add(work: GroupWork, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Remembers a call that was started, until remove()."""
    if len(_works) >= _MANY:  # nobody has waited for most of them
        for old, *_ in list(_works.values()):
            if all(lib.farandole_settled(number) != 0 for number in old.numbers):
                remove(old)
    _works[id(work)] = work, _ranges(reads), _ranges(writes)


def remove(work: GroupWork) -> None:
    """Forgets a call that has ended."""
    _works.pop(id(work), None)


def _ranges(tensors: Iterable[Tensor]) -> Ranges:
    found = []
    for x in tensors:
        if x.layout is torch.strided and x.numel():
            begin, last = x.data_ptr(), 0
            for size, stride in zip(x.shape, x.stride(), strict=True):
                last += (size - 1) * stride
            found.append((begin, begin + (last + 1) * x.element_size()))
    return found


def _meet(some: Ranges, others: Ranges) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
