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
from itertools import repeat
from typing import Any

from farandole._library import error, ffi, lib
from farandole.calls import part

_held: dict[int, object] = {}
_dropped: deque[int] = deque()  # handles that nobody will wait for
# Memory of submissions that an exception broke off, so that nobody knows the handle.
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


def lend(start: Callable[..., int], input: Any, output: Any, memory: object, *more: Any) -> int:
    """Submits by `start(input, output, *more)`, of C, which returns a handle or -code; returns the
    handle.

    `memory` is kept until the handle is settled. Raises the core's error; then nothing is lent.
    """
    if _dropped:
        sweep()
    try:
        number = start(input, output, *more)
        if number > 0:
            _held[number] = memory
            return number
    except BaseException as reason:
        _broken_off(reason, memory)
        raise
    raise error(-number)


def _broken_off(reason: BaseException, memory: object) -> None:
    """Keeps memory that the core may have taken before a signal handler raised `reason`, and ends
    this rank's part in the job."""
    _stranded.append(memory)
    part.end(reason)


def lend_all(requests: Any, memory: Sequence[object], numbers: Any) -> Any:
    """Submits farandole_requests at once; returns `numbers`, zeros that get their handles.

    `memory[i]` has to live for request i. Returns the core's error, which the peers get
    too, if it takes none of them; then nothing is lent.
    """
    if _dropped:
        sweep()
    try:
        code = lib.farandole_submit(requests, len(numbers), numbers)
        if code == 0:
            _held.update(zip(numbers, memory, strict=True))
    except BaseException as reason:
        _broken_off(reason, memory)
        raise
    return numbers if code == 0 else error(code)


def lend_prepared(
    calls: Sequence[int], addresses: Sequence[int], memory: Sequence[object]
) -> tuple[list[int], Exception | None]:
    """Submits prepared calls in place, by their numbers, at `addresses`.

    `memory[i]` has to live for call i. Returns the handles, and the error of the call behind the
    last of them, if the core has not taken all.
    """
    if _dropped:
        sweep()
    numbers = ffi.new("int64_t[]", len(calls))
    try:
        code = lib.farandole_submit_prepared_batch(
            ffi.new("int64_t[]", calls), ffi.new("uintptr_t[]", addresses), len(calls), numbers
        )
        handles = list(numbers) if code == 0 else [*filter(None, numbers)]
        _held.update(zip(handles, memory, strict=False))
    except BaseException as reason:
        _broken_off(reason, memory)
        raise
    return handles, error(code) if code else None


def end(numbers: Any) -> None:
    """Releases handles that the core has settled, and the memory lent to them."""
    if len(numbers) == 1:
        lib.farandole_release(numbers[0])
    else:
        lib.farandole_release_all(numbers_of(numbers), len(numbers))
    deque(map(end_one, numbers, repeat(None)), 0)


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
        settled = lib.farandole_settled(number)  # polling would count as a waiting user
        if settled == 0:
            _dropped.append(number)
        elif settled != -lib.FARANDOLE_E_SHUTDOWN:  # then only shutdown() knows
            end((number,))


def numbers_of(handles: Any) -> Any:
    """Core handles as an int64_t[], made once for several calls about them."""
    return handles if isinstance(handles, ffi.CData) else ffi.new("int64_t[]", handles)
