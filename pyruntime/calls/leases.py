# SPDX-License-Identifier: Apache-2.0
"""Leases: the one owner of memory that the core reads or writes.

Every submission goes through lend() or lend_all(), which keep the submission's buffers in a table,
keyed by the core's handle. An entry is removed only after the core has reported that the handle is
settled. So no event in Python (a dropped handle, an exception, a time-out, garbage collection) can
free memory that the core uses. Any thread may use this module.
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
# Memory of submissions that an exception has interrupted, so that their handles are unknown.
_stranded: list[object] = []

end_one = _held.pop  # like end(), for one handle that farandole_finish has released


def restart() -> None:
    """Makes all older handles invalid; the core never reuses their numbers. init() calls this."""
    for table in (_held, _dropped, _stranded):
        table.clear()


def lost(numbers: Iterable[int]) -> bool:
    """True if these handles, which were not ended, were still in use at the last shutdown()."""
    return not all(map(_held.__contains__, numbers))


def in_flight() -> list[tuple[int, object]]:
    """(handle, memory lent to it) for handles that the core has not settled."""
    return [lease for lease in list(_held.items()) if lib.farandole_settled(lease[0]) == 0]


def lend(start: Callable[[Any, Any], int], input: Any, output: Any, memory: object) -> int:
    """Submits a call through the C function `start(input, output)`, which returns a handle, 0 if
    the call is done already, or minus an error code. Returns the handle or 0.

    Keeps `memory` until the handle is settled. If the core raises an error, keeps nothing.
    """
    if _dropped:
        sweep()
    try:
        number = start(input, output)
        if number > 0:
            _held[number] = memory
            return number
        if number == 0:
            return 0
    except BaseException as reason:
        _broken_off(reason, memory)
        raise
    raise error(-number)


def _broken_off(reason: BaseException, memory: object) -> None:
    """Keeps `memory` and makes this rank leave the job. The core may have taken the memory before a
    signal handler raised `reason`."""
    _stranded.append(memory)
    part.end(reason)


def lend_all(
    calls: Any, inputs: Any, outputs: Any, streams: Any, memory: Sequence[object], count: int
) -> tuple[Any, Exception | None]:
    """Submits `count` prepared calls at once; `calls` holds their numbers. For every tensor there
    is the address of an input, the address of an output, and a stream.

    Keeps `memory[i]` until tensor i is settled. Returns (handles as int64_t[], error of the call
    that the core has refused). Peers also get that error. The refused call and later calls have
    handles 0.
    """
    if _dropped:
        sweep()
    numbers = ffi.new("int64_t[]", len(memory))
    try:
        code = lib.farandole_submit(calls, inputs, outputs, streams, count, numbers)
        _held.update(zip(filter(None, numbers), memory, strict=False))
    except BaseException as reason:
        _broken_off(reason, memory)
        raise
    return numbers, error(code) if code else None


def end(numbers: Any) -> None:
    """Releases handles that the core has settled, and the memory lent to them."""
    if len(numbers) == 1:
        lib.farandole_release(numbers[0])
    else:
        lib.farandole_release_all(numbers_of(numbers), len(numbers))
    deque(map(end_one, numbers, repeat(None)), 0)


def drop(numbers: Iterable[int]) -> None:
    """Leaves these handles to sweep(), because nobody will wait for them."""
    _dropped.extend(filter(_held.__contains__, numbers))


def sweep(most: int = 8) -> None:
    """Examines the `most` oldest dropped handles and ends those that are settled.

    Every submission calls this first, so handles end faster than new ones are added.
    """
    for _ in range(min(most, len(_dropped))):
        try:
            number = _dropped.popleft()
        except IndexError:  # another thread sweeps too
            return
        settled = lib.farandole_settled(number)  # farandole_poll() would count as a waiting user
        if settled == 0:
            _dropped.append(number)
        elif settled != -lib.FARANDOLE_E_SHUTDOWN:  # otherwise restart() frees the memory
            end((number,))


def numbers_of(handles: Any) -> Any:
    """The core's handles as int64_t[], an array that several C calls can share."""
    return handles if isinstance(handles, ffi.CData) else ffi.new("int64_t[]", handles)
