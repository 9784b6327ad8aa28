# SPDX-License-Identifier: Apache-2.0
"""Leases: the one owner of memory that the core reads or writes.

Every submission goes through `lend` or `lend_all`, which keep what it reads and writes in one
table, by the core's handle. Only the core's own word that a handle is settled takes it out again.
So nothing that happens in Python to handles, optimizers or arrays (dropped, raised through, timed
out, collected) can free memory in flight. Any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from farandole._library import error, ffi, lib

__all__ = [
    "drop",
    "end",
    "end_one",
    "epoch",
    "lend",
    "lend_all",
    "lend_kept",
    "numbers_of",
    "restart",
    "sweep",
]

_held: dict[int, object] = {}
_dropped: deque[int] = deque()  # of these handles, which nobody will wait for
# Memory of submissions whose handle an exception of a signal handler has lost: kept to the end.
_stranded: list[object] = []
_epoch = 0  # grows with every init(): the core counts its handles from the start again

end_one = _held.pop  # as end(), for a handle that farandole_finish has released


def restart() -> None:
    """From now on older handles stand for nothing in the core. init() calls this."""
    global _epoch
    _epoch += 1
    for table in (_held, _dropped, _stranded):
        table.clear()


def epoch() -> int:
    """How often the core has begun to count its handles."""
    return _epoch


def lend(start: Callable[[Any, Any], int], input: Any, output: Any, memory: object) -> int:
    """Submits by `start(input, output)`, which answers a handle or -code; returns the handle.

    `memory` is whatever has to live until then. Raises the core's error; then nothing is lent.
    """
    if _dropped:
        sweep()
    try:
        number = start(input, output)
        if number > 0:
            _held[number] = memory
            return number
    except BaseException:
        _stranded.append(memory)  # the core may have taken the call before the signal came
        raise
    raise error(-number)


def lend_all(requests: Any, count: int, memory: Sequence[object]) -> Any:
    """Submits `count` farandole_requests at once; returns int64_t[] of their handles.

    `memory[i]` has to live for request i. Returns the core's error, of which the peers know, where
    it takes none of them; then nothing is lent.
    """
    if _dropped:
        sweep()
    numbers = ffi.new("int64_t[]", count)
    try:
        code = lib.farandole_submit(requests, count, numbers)
        if code == 0:
            _held.update(zip(numbers, memory, strict=True))
    except BaseException:
        _stranded.append(memory)
        raise
    return numbers if code == 0 else error(code)


def lend_kept(
    tensors: Sequence[int], addresses: Sequence[int], numbers: Any, memory: Sequence[object]
) -> None:
    """Submits prepared tensors in place, by their numbers, where `addresses` says.

    Their handles come into `numbers`, zeros of numbers_of(); `memory[i]` has to live for number i.
    Raises the core's error, and what the handler of a signal raises; then the numbers that are not
    0 have been submitted.
    """
    if _dropped:
        sweep()
    try:
        code = lib.farandole_submit_buffers(
            ffi.new("int64_t[]", tensors), ffi.new("uintptr_t[]", addresses), len(numbers), numbers
        )
        _held.update(zip(numbers, memory, strict=True))
    except BaseException:
        _stranded.append(memory)
        raise
    if code != 0:
        _held.pop(0, None)
        raise error(code)


def end(numbers: Any) -> None:
    """Gives back handles that the core has settled: their memory is free."""
    if len(numbers) == 1:
        lib.farandole_release(numbers[0])
    else:
        lib.farandole_release_all(numbers_of(numbers), len(numbers))
    deque(map(end_one, numbers, repeat(None)), 0)


def drop(numbers: Sequence[int], epoch: int) -> None:
    """Nobody waits for these handles any more. `epoch`: that of their submission."""
    if epoch == _epoch:
        _dropped.extend(numbers)


def sweep(most: int = 8) -> None:
    """Ends those of the `most` oldest dropped handles that are settled.

    Every submission does this first: it looks at more than it can add.
    """
    for _ in range(min(most, len(_dropped))):
        try:
            number = _dropped.popleft()
        except IndexError:  # another thread sweeps too
            return
        if lib.farandole_settled(number) == 0:  # to poll it would be to wait
            _dropped.append(number)
        else:
            end((number,))


def numbers_of(handles: Any) -> Any:
    """Core handles as the core takes them: made once for all calls about the same ones."""
    return handles if isinstance(handles, ffi.CData) else ffi.new("int64_t[]", handles)
