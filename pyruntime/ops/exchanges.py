# SPDX-License-Identifier: Apache-2.0
"""alltoall, which sends rows by splits. Public calls, for any thread."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Call, Op
from farandole.calls.rows import Table, splits_of
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops.starts import T, one, start_rows

Rows = np.ndarray[Any, np.dtype[np.int64]]


def _with_rows(pair: tuple[T, Table]) -> tuple[T, Rows]:
    return pair[0], np.array(pair[1], np.int64)


def _without_rows(pair: tuple[T, object]) -> T:
    return pair[0]


@collective(Op.ALLTOALL)
def alltoall_async(
    tensor: T,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[tuple[T, Rows]]:
    """Starts to send rows to each member, and to receive rows from each.

    Member i gets the next `splits[i]` rows of the array. The result holds the received rows in rank
    order. Rows for a member that has joined are dropped. Returns a handle; its wait() returns (a
    new array of the same kind, the number of rows from each member as int64).

    - tensor: an array with at least one dimension, on a CPU or GPU: integers, floats, bool or
      complex. The dtype and all dimensions but the first are equal on all ranks.
    - splits: integers, the number of rows for each member, in member order; None: equal parts.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall_async(np.arange(3), splits=[3]).wait()
        (array([0, 1, 2]), array([3]))
    """
    call = Call(Op.ALLTOALL, name, set_id(process_set), splits=splits_of(splits))
    return one(start_rows(call, [tensor], timeout)).map(_with_rows)


@overload
def alltoall(
    tensor: T,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T: ...
@overload
def alltoall(
    tensor: T,
    splits: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> tuple[T, Rows]: ...
@waiting(Op.ALLTOALL)
def alltoall(
    tensor: T,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Sends rows to each member, and receives rows from each.

    Member i gets the next `splits[i]` rows of the array. The result holds the received rows in rank
    order. Rows for a member that has joined are dropped. Returns a new array of the same kind; with
    `splits`, (the array, the number of rows from each member as int64).

    - tensor: an array with at least one dimension, on a CPU or GPU: integers, floats, bool or
      complex. The dtype and all dimensions but the first are equal on all ranks.
    - splits: integers, the number of rows for each member, in member order; None: equal parts.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall(np.arange(3))
        array([0, 1, 2])
    """
    handle: Handle[Any] = alltoall_async(tensor, splits, name, process_set, timeout=timeout)
    return wait_for(handle.map(_without_rows) if splits is None else handle)
