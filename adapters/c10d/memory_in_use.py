# SPDX-License-Identifier: Apache-2.0
"""Unfinished torch.distributed calls and the tensors that they use. May be used from any thread.

torch's backends execute a group's calls in order. A program may therefore start a call on a tensor
that an earlier call still uses, and wait for both calls later. The core would refuse the second
call. This module delays the second call until the first call has ended.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from farandole._library import lib
from farandole.errors import StallError

if TYPE_CHECKING:
    from farandole.c10d.work import GroupWork


class _Use(NamedTuple):
    """One tensor that a call uses. Uses are ordered by address."""

    begin: int
    end: int
    serial: int
    tensor: Tensor
    writes: bool
    work: GroupWork


# In elements. Strided tensors that span more than this count as overlapping.
_MOST_SPAN = 64 << 20
_SWEPT = 8  # number of calls that each add() examines, and completes if they are settled
_serials = itertools.count()
_lock = threading.RLock()  # reentrant, because the garbage collector may end a group, which sweeps
_uses: list[_Use] = []  # sorted
_longest = 0  # number of bytes that the longest tensor so far spans
# Keys are ids of works. sweep() examines the first ones. If _uses has a use of a work, the work is
# here, so sweep() finds it even if a signal handler raises in between.
_of_work: OrderedDict[int, tuple[GroupWork, list[_Use]]] = OrderedDict()


def wait_for_users(reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Waits for earlier calls that conflict with a call that reads and writes these tensors.

    Raises StallError if an earlier call does not end in time. Other errors of an earlier call are
    raised by that call's own wait().
    """
    if not _of_work:
        return
    for tensors, writes_them in ((reads, False), (writes, True)):
        for x in _plain(tensors):
            for work in _users(x, writes_them):
                if isinstance(failure := work.outcome(), StallError):
                    raise failure


def add(work: GroupWork, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Records that a started call uses these tensors, until remove()."""
    global _longest
    sweep(_SWEPT)
    uses = [
        _Use(*_interval(x), next(_serials), x, writes_it, work)
        for tensors, writes_it in ((reads, False), (writes, True))
        for x in _plain(tensors)
    ]
    if not uses:
        return
    with _lock:
        _longest = max(_longest, *(use.end - use.begin for use in uses))
        _of_work[id(work)] = work, uses
        for use in uses:
            insort(_uses, use)
        if id(work) not in _of_work:  # a signal handler's call has swept it meanwhile
            _discard(uses)


def remove(work: GroupWork) -> None:
    """Removes a call that has ended."""
    with _lock:
        _discard(_of_work.get(id(work), (work, []))[1])
        _of_work.pop(id(work), None)


def _discard(uses: Iterable[_Use]) -> None:
    """Removes uses, as far as they are still recorded. The caller must hold the lock."""
    for use in uses:
        at = bisect_left(_uses, use)
        if _uses[at : at + 1] == [use]:
            del _uses[at]


def count() -> int:
    """Returns the number of recorded calls."""
    return len(_of_work)


def _users(x: Tensor, writes: bool) -> list[GroupWork]:
    begin, end = _interval(x)
    found = []
    with _lock:
        for use in _uses[bisect_left(_uses, (begin - _longest,)) :]:
            if use.begin >= end:
                break
            if (use.writes or writes) and use.end > begin:
                found.append(use)
    return [use.work for use in found if _share_elements(use.tensor, x)]


def sweep(most: int | None = None) -> None:
    """Completes settled calls, in case nobody waits for them.

    Examines the `most` oldest calls, or all if `most` is None. Skips calls with results on a GPU,
    because their wait() must run in the stream that uses the results.
    """
    for work, _ in list(_of_work.values())[:most]:
        settled = all(lib.farandole_settled(number) != 0 for number in work.numbers)
        if settled and not work.devices:
            work.outcome()
            remove(work)
            continue
        with suppress(KeyError):  # another thread has removed it
            _of_work.move_to_end(id(work))


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the strided tensors that hold the elements of `tensors`. A sparse tensor has two."""
    for x in tensors:
        if x.layout is torch.sparse_coo:
            yield from _plain((x._indices(), x._values()))
        elif x.layout is torch.strided and x.numel():
            yield x


def _interval(x: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    begin = x.data_ptr()
    return begin, begin + (last + 1) * x.element_size()


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors have an element in common.

    The caller has found that the tensors' intervals overlap. Their elements may still interleave,
    as the columns of a matrix do.
    """
    if a.is_contiguous() and b.is_contiguous():
        return True
    size, begin = a.element_size(), min(a.data_ptr(), b.data_ptr())
    span = (max(_interval(a)[1], _interval(b)[1]) - begin) // size
    if b.element_size() != size or (a.data_ptr() - b.data_ptr()) % size or span > _MOST_SPAN:
        return True
    used = torch.zeros(span, dtype=torch.bool, device="cpu")
    places = [used.as_strided(x.shape, x.stride(), (x.data_ptr() - begin) // size) for x in (a, b)]
    places[0].fill_(True)
    return bool(places[1].any())
