# SPDX-License-Identifier: Apache-2.0
"""join(): how ranks that are out of data wait for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from farandole.calls.door import collective_then
from farandole.calls.handles import Handle, value_of
from farandole.calls.requests import NOTHING, Call, Op, note_join, refuse_all, submit
from farandole.members import ProcessSet, global_process_set, set_id

__all__ = ["join"]


def _start(call: Call, timeout: float | None) -> Handle[int]:
    numbers = submit(call, [NOTHING])
    note_join(call.process_set)
    return Handle(numbers, lambda done: value_of(done[0]), call, timeout)


def _join_in_vain(calls: list[Call], reason: Exception) -> None:
    """Joins, since that is how the others hear what was wrong with this rank's join().

    Not where they may wait in several sets: in the wrong one it would wait for them in vain.
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
    """Says that this rank is out of data and blocks until all members are: the last one's rank.

    Meanwhile it contributes the identity to the others' reductions. `device` is accepted for
    Horovod's sake; the runtime needs none. A wrong argument on one rank is an error on all members,
    once all of them have joined.
    """
    return _start(Call(Op.JOIN, process_set=set_id(process_set)), timeout).wait
