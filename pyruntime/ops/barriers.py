# SPDX-License-Identifier: Apache-2.0
"""The public collectives without arrays: barrier and join."""

from __future__ import annotations

import contextlib

from farandole.calls.handles import Handle, value_of
from farandole.calls.public_call import collective, then
from farandole.calls.requests import NOTHING, Call, Op, note_join, refuse_all, submit
from farandole.errors import StallError
from farandole.members import ProcessSet, global_process_set, set_id


@collective(Op.BARRIER)
def barrier(
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Waits until every member has called barrier() or join().

    If you pass a `name`, you may call this from any thread.

    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

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


def _wait_for_join(handle: Handle[int], process_set: int) -> int:
    try:
        return handle.wait()
    except StallError as error:
        if not error.under_way:  # the join was given up, so other ranks have not counted it
            note_join(process_set, -1)
        raise


def _join_with_error(calls: list[Call], reason: Exception) -> None:
    """Reports a wrong join() to the other ranks by joining with an error.

    Does nothing if the call may be for one of several sets, because this rank would wait forever in
    a wrong set.
    """
    if len(calls) == 1:
        refuse_all(calls, reason)
        with contextlib.suppress(Exception):  # the caller raises `reason`
            _start_join(calls[0], None).wait()


@collective(Op.JOIN, tell=_join_with_error)
def join(
    device: int = -1,
    *,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> int:
    """Waits until all members have joined, and returns the rank that joined last. Call this when
    this rank has no more data.

    Until then, this rank contributes the identity to the other ranks' reductions, such as zeros to
    sums and ones to products. An average still divides by the number of all members. In allgather
    and alltoall, this rank has no rows. Rows that others send to it are dropped, and their
    gradients are zero. Calls that need this rank as root or as a member of a new process set raise
    an error on the ranks that make them. If one rank passes a wrong argument, all members raise an
    error once all have joined.

    - device: ignored. It exists for compatibility with Horovod.
    - process_set: the ranks that take part, by default all.
    - timeout: seconds until the wait raises StallError. The join then continues. The join itself
      ends with StallError if no rank has made a call for FARANDOLE_STALL_ABORT seconds.

    Raises PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.join()
        0
    """
    number = set_id(process_set)
    handle = _start_join(Call(Op.JOIN, process_set=number), timeout)
    return then(lambda: _wait_for_join(handle, number))
