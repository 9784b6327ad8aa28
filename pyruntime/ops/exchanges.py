# SPDX-License-Identifier: Apache-2.0
"""The public calls for alltoall, which exchanges rows between ranks. They are thread-safe."""

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
    """Starts to send rows to each member and to receive rows from each member.

    Member i gets the next `splits[i]` rows of the array. The result holds the received rows in rank
    order. Rows for a member that has joined are dropped. Returns a handle whose wait() returns a
    new array of the same kind and an int64 array with the number of rows from each member.

    - tensor: an array of integers, floats, bool or complex with at least one dimension, on a CPU or
      GPU. The dtype and all dimensions except the first must be equal on all ranks.
    - splits: integers in member order, the number of rows for each. None means equal parts.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
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
    """Sends rows to each member and receives rows from each member.

    Member i gets the next `splits[i]` rows of the array. The result holds the received rows in rank
    order. Rows for a member that has joined are dropped. Returns a new array of the same kind. If
    `splits` is given, also returns an int64 array with the number of rows from each member.

    - tensor: an array of integers, floats, bool or complex with at least one dimension, on a CPU or
      GPU. The dtype and all dimensions except the first must be equal on all ranks.
    - splits: integers in member order, the number of rows for each. None means equal parts.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall(np.arange(3))
        array([0, 1, 2])
    """
    handle: Handle[Any] = alltoall_async(tensor, splits, name, process_set, timeout=timeout)
    return wait_for(handle.map(_without_rows) if splits is None else handle)
