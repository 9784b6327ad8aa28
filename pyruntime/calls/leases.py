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


def lend(start: Callable[[Any, Any], int], input: Any, output: Any, memory: object) -> int:
    """Submits by `start(input, output)`, of C, which returns a handle, -code, or 0 if the call is
    done already; returns the handle or 0.

    `memory` is kept until the handle is settled. Raises the core's error; then nothing is lent.
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
    """Keeps memory that the core may have taken before a signal handler raised `reason`, and ends
    this rank's part in the job."""
    _stranded.append(memory)
    part.end(reason)


def lend_all(
    calls: Any, inputs: Any, outputs: Any, streams: Any, memory: Sequence[object], count: int
) -> tuple[Any, Exception | None]:
    """Submits `count` prepared calls at once, by their numbers: each has an address of an input and
    of an output, and a stream, for every tensor.

    `memory[i]` has to live for tensor i. Returns int64_t[] of handles, and the error of the call
    that the core has refused, which the peers get too; then the handles from there on are 0.
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
