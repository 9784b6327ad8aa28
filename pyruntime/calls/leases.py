# SPDX-License-Identifier: Apache-2.0
"""Leases own all memory that the core reads or writes.

Every submission goes through lend() or lend_all(). They keep the submission's buffers in a table
keyed by the core's handle. An entry is removed only after the core has reported that the handle is
settled. Therefore no event in Python, such as a dropped handle, an exception, a time-out or a
garbage collection, can free memory that the core uses. This module may be used from any thread.
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
# Memory of submissions that an exception interrupted. Their handles are unknown.
_stranded: list[object] = []

end_one = _held.pop  # like end(), but for one handle that farandole_finish has released


def restart() -> None:
    """Makes all older handles invalid. The core never reuses their numbers. init() calls this."""
    for table in (_held, _dropped, _stranded):
        table.clear()


def lost(numbers: Iterable[int]) -> bool:
    """True if these handles, which nobody has ended, were still in use at the last shutdown()."""
    return not all(map(_held.__contains__, numbers))


def in_flight() -> list[tuple[int, object]]:
    """Returns a pair (handle, memory lent to it) for each handle that the core has not settled."""
    return [lease for lease in _held.copy().items() if lib.farandole_settled(lease[0]) == 0]


def lend(start: Callable[[Any, Any], int], input: Any, output: Any, memory: object) -> int:
    """Submits a call through the C function `start(input, output)`. Returns the call's handle, or 0
    if the call is done already. `start` returns the same, or a negated error code.

    Keeps `memory` until the handle is settled. If the core reports an error, does not keep it.
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
    """Keeps `memory` and makes this rank leave the job, because the core may have taken the memory
    before a signal handler raised `reason`."""
    _stranded.append(memory)
    part.end(reason)


def lend_all(
    calls: Any, inputs: Any, outputs: Any, streams: Any, memory: Sequence[object], count: int
) -> tuple[Any, Exception | None]:
    """Submits `count` prepared calls at once. `calls` holds their numbers. `inputs`, `outputs` and
    `streams` hold an input address, an output address and a stream for every tensor.

    Keeps `memory[i]` until tensor i is settled. Returns the handles as int64_t[] and, if the core
    refuses a call, that call's error, which the peers also get. The handles of the refused call and
    of later calls are 0.
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
    """Hands these handles over to sweep(), because nobody will wait for them."""
    _dropped.extend(filter(_held.__contains__, numbers))


def sweep(most: int = 8) -> None:
    """Examines the `most` oldest dropped handles and ends those that are settled.

    Every submission calls this first, so handles are ended faster than new ones are added.
    """
    for _ in range(min(most, len(_dropped))):
        try:
            number = _dropped.popleft()
        except IndexError:  # another thread is also sweeping
            return
        settled = lib.farandole_settled(number)  # farandole_poll() would count as a waiting user
        if settled == 0:
            _dropped.append(number)
        elif settled != -lib.FARANDOLE_E_SHUTDOWN:  # after a shutdown, restart() frees the memory
            end((number,))


def numbers_of(handles: Any) -> Any:
    """Returns the core's handles as int64_t[], an array that can be passed to several C calls."""
    return handles if isinstance(handles, ffi.CData) else ffi.new("int64_t[]", handles)
