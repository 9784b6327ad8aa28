# SPDX-License-Identifier: Apache-2.0
"""Leases: the one owner of memory that the core reads or writes.

Every submission goes through a `lend` function, which keeps what it reads and writes in one
table, by the core's handle. An entry is removed only when the core says that the handle is
settled. So nothing that happens to handles, optimizers or arrays in Python (dropped, exceptions,
time-outs, garbage collection) can free memory in use by the core. Any thread may call this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat, starmap
from typing import Any, NamedTuple

from farandole._library import error, ffi, lib


class _Taken(NamedTuple):
    lent: object  # as in _held
    pointers: list[Any]


_held: dict[int, object] = {}
_dropped: deque[int] = deque()  # handles that nobody will wait for
# Memory of submissions whose handle was lost to a signal handler's exception; never freed.
_stranded: list[object] = []

end_one = _held.pop  # as end(), for one handle that farandole_finish has released


def restart() -> None:
    """Makes all older handles invalid; the core never reuses their numbers. init() calls this."""
    for table in (_held, _dropped, _stranded):
        table.clear()


def lost(numbers: Iterable[int]) -> bool:
    """True if handles that nobody has ended were under way at the last shutdown()."""
    return not all(map(_held.__contains__, numbers))


def in_flight() -> list[tuple[int, object]]:
    """(handle, memory lent to it) for handles that the core has not settled."""
    return [lease for lease in list(_held.items()) if lib.farandole_settled(lease[0]) == 0]


def lend(
    start: Callable[..., int],
    input: Any,
    output: Any,
    memory: object,
    made: list[int] | None = None,
    *more: Any,
) -> int:
    """Submits by `start(input, output, *more)`, of C, which returns a handle or -code; returns the
    handle.

    `memory` is kept until the handle is settled. Raises the core's error; then nothing is lent.
    `made`, an empty list, gets what `start` returns, also where a signal handler raises: then a
    number above 0 is a handle that the caller has.
    """
    if _dropped:
        sweep()
    try:
        if made is None:
            number = start(input, output, *more)
        else:
            made.extend(starmap(start, ((input, output, *more),)))  # no signal is heard within it
            number = made[0]
        if number > 0:
            _held[number] = memory
            return number
    except BaseException:
        if made and made[0] > 0:
            _held[made[0]] = memory
        else:
            _stranded.append(memory)  # the core may have taken it before the signal came
        raise
    raise error(-number)


def lend_all(requests: Any, memory: Sequence[object], numbers: Any) -> Any:
    """Submits farandole_requests at once; returns `numbers`, zeros that get their handles, also
    where a signal handler raises.

    `memory[i]` has to live for request i. Returns the core's error, which the peers get
    too, if it takes none of them; then nothing is lent.
    """
    if _dropped:
        sweep()
    try:
        code = lib.farandole_submit(requests, len(numbers), numbers)
        if code == 0:
            _held.update(zip(numbers, memory, strict=True))
    except BaseException:
        _stranded.append(memory)
        raise
    return numbers if code == 0 else error(code)


def lend_prepared(
    calls: Sequence[int], addresses: Sequence[int], numbers: Any, memory: Sequence[object]
) -> None:
    """Submits prepared calls in place, by their numbers, at `addresses`.

    Writes the handles to `numbers`, zeros of numbers_of(); `memory[i]` has to live for number i.
    Raises the core's error, or a signal handler's exception; then the calls whose handle is not
    0 have been submitted.
    """
    if _dropped:
        sweep()
    try:
        code = lib.farandole_submit_prepared_batch(
            ffi.new("int64_t[]", calls), ffi.new("uintptr_t[]", addresses), len(numbers), numbers
        )
        _held.update(zip(numbers, memory, strict=True))
    except BaseException:
        _stranded.append(memory)
        raise
    if code != 0:
        _held.pop(0, None)
        raise error(code)


def end(numbers: Any) -> None:
    """Releases handles that the core has settled, and the memory lent to them."""
    try:
        if len(numbers) == 1:
            lib.farandole_release(numbers[0])
        else:
            lib.farandole_release_all(numbers_of(numbers), len(numbers))
        deque(map(end_one, numbers, repeat(None)), 0)
    except BaseException:  # of a signal handler: sweep() may release a handle again
        _dropped.extend(numbers)
        raise


def taken(number: int) -> list[Any]:
    """What was taken of a handle's result; empty at first. Kept until the handle ends, since it can
    be taken once only, and a signal handler's exception may come before it is used."""
    entry = _held.get(number)
    if not isinstance(entry, _Taken):
        entry = _held[number] = _Taken(entry, [])
    return entry.pointers


def drop(numbers: Iterable[int]) -> None:
    """Leaves these handles to sweep(): nobody will wait for them."""
    _dropped.extend(filter(_held.__contains__, numbers))


def sweep(most: int = 8) -> None:
    """Ends those of the `most` oldest dropped handles that are settled.

    Every submission calls this first and so ends more than it adds.
    """
    for _ in range(min(most, len(_dropped))):
        try:
            number = _dropped.popleft()
        except IndexError:  # another thread sweeps too
            return
        if lib.farandole_settled(number) == 0:  # polling would count as a waiting user
            _dropped.append(number)
        else:
            end((number,))


def numbers_of(handles: Any) -> Any:
    """Core handles as an int64_t[], made once for several calls about them; a number: so many
    zeros, which are to get handles."""
    return handles if isinstance(handles, ffi.CData) else ffi.new("int64_t[]", handles)
