# SPDX-License-Identifier: Apache-2.0
"""join(): how ranks that are out of data wait for the others. A public call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from farandole.calls.handles import Handle, value_of
from farandole.calls.public_call import collective_then
from farandole.calls.requests import NOTHING, Call, Op, note_join, refuse_all, submit
from farandole.members import ProcessSet, global_process_set, set_id


def _start(call: Call, timeout: float | None) -> Handle[int]:
    numbers = submit(call, [NOTHING])
    note_join(call.process_set)
    return Handle(numbers, lambda done: value_of(done[0]), call, timeout)


def _join_in_vain(calls: list[Call], reason: Exception) -> None:
    """Joins with an error, so that the other ranks get the error of this rank's join().

    Not if several sets are possible: in the wrong one this rank would wait forever.
    """
    if len(calls) == 1:
        refuse_all(calls, reason)
        with contextlib.suppress(Exception):  # `reason` itself is the error to raise
            _start(calls[0], None).wait()


@collective_then(Op.JOIN, tell=_join_in_vain)
def join(
    device: int = -1,
    *,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Callable[[], int]:
    """Waits, out of data, until all members have joined; returns the last one's rank.

    Meanwhile this rank contributes the identity to the others' reductions: zeros to sums, ones to
    products. A wrong argument on one rank is an error on all members, once all have joined.

    Examples:
        >>> hvd.join()
        0
    """
    return _start(Call(Op.JOIN, process_set=set_id(process_set)), timeout).wait
