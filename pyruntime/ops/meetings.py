# SPDX-License-Identifier: Apache-2.0
"""barrier and join, in which ranks meet without arrays: public calls."""

from __future__ import annotations

import contextlib

from farandole.calls.handles import Handle, value_of
from farandole.calls.public_call import collective, then
from farandole.calls.requests import NOTHING, Call, Op, note_join, refuse_all, submit
from farandole.members import ProcessSet, global_process_set, set_id


@collective(Op.BARRIER)
def barrier(
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Returns when every member has called it or has joined. With a `name` any thread may call it.

    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.barrier()
    """
    call = Call(Op.BARRIER, name, set_id(process_set))
    return then(Handle(submit(call, [NOTHING], own=2), lambda _: None, call, timeout).wait)


def _start_join(call: Call, timeout: float | None) -> Handle[int]:
    numbers = submit(call, [NOTHING], own=1)
    note_join(call.process_set)
    return Handle(numbers, lambda done: value_of(done[0]), call, timeout)


def _join_in_vain(calls: list[Call], reason: Exception) -> None:
    """Joins with an error, so that the other ranks get the error of this rank's join().

    Not if several sets are possible: in the wrong one this rank would wait forever.
    """
    if len(calls) == 1:
        refuse_all(calls, reason)
        with contextlib.suppress(Exception):  # `reason` itself is the error to raise
            _start_join(calls[0], None).wait()


@collective(Op.JOIN, tell=_join_in_vain)
def join(
    device: int = -1,
    *,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Waits, out of data, until all members have joined; returns the last one's rank.

    Meanwhile this rank contributes the identity to the others' reductions: zeros to sums, ones to
    products. An average still divides by all members. This rank brings no rows to gathers and
    exchanges; rows that others send to it are dropped, and their gradients are zeros. Calls that
    need this rank, as their root or as a member of a new process set, are errors on the ranks that
    make them. A wrong argument on one rank is an error on all members, once all have joined.

    - device: accepted for compatibility with Horovod, and not used.
    - process_set: the ranks that take part, by default all.
    - timeout: seconds, after which the wait raises StallError.

    Raises PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.join()
        0
    """
    return then(_start_join(Call(Op.JOIN, process_set=set_id(process_set)), timeout).wait)
