# SPDX-License-Identifier: Apache-2.0
"""alltoall and scatter: rows are sent to members by splits. Public calls, for any thread; arguments
and errors as in ops."""

from __future__ import annotations

from operator import index
from typing import Any, TypeVar, overload

import numpy as np

from farandole.calls.arguments import shown
from farandole.calls.documents import of_waiting
from farandole.calls.handles import Handle, take
from farandole.calls.public_call import collective
from farandole.calls.requests import Call, Op, submit
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import _blocking, _handle, _start, describe

T = TypeVar("T")
Rows = np.ndarray[Any, np.dtype[np.int64]]


@collective(Op.ALLTOALL)
def alltoall_async(
    tensor: T,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[tuple[T, Rows]]:
    """Sends `splits[i]` rows of the array to member i, and receives theirs in rank order.

    At least one dimension; dtype and all dimensions but the first are equal on all ranks. Returns a
    handle, whose wait() gives (a new array of the same kind, the rows from each member as int64);
    alltoall() gives the array alone if it has no `splits`.

    Examples:
        >>> hvd.alltoall_async(np.arange(3), splits=[3]).wait()
        (array([0, 1, 2]), array([3]))
    """
    (kind,), (buffer,) = describe([tensor], in_place=False)
    call = Call(Op.ALLTOALL, name, set_id(process_set), splits=_rows(splits))

    def collect(numbers: Any) -> tuple[T, Rows]:
        memory, received = take(numbers[0], buffer, kind.stream(tensor))
        return kind.wrap(memory, tensor), np.array(received, np.int64)

    return _handle(submit(call, [buffer]), [buffer], [tensor], collect, str(call), timeout)


@collective(Op.SCATTER)
def scatter_async(
    tensor: T,
    root_rank: int = 0,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[T]:
    """This rank's rows of the array of `root_rank`, a rank of the world: a new array.

    Member i gets `splits[i]` rows, in member order; only the root's splits count. On the other
    ranks `tensor` tells what to receive: kind of array, device, dtype and all dimensions but the
    first. It may have no rows, as numpy.empty((0, 3), "float32"). Returns a handle, whose wait()
    gives a new array of the same kind.

    Examples:
        >>> hvd.scatter_async(np.arange(3), root_rank=0, splits=[3]).wait()
        array([0, 1, 2])
    """
    call = Call(Op.SCATTER, name, set_id(process_set), root=index(root_rank), splits=_rows(splits))
    return _start(call, [tensor], timeout).map(lambda results: results[0])


def _rows(splits: Any) -> tuple[int, ...]:
    """Splits from a list, an array or a tensor on any device."""
    if splits is None:
        return ()
    try:
        rows = splits.tolist() if hasattr(splits, "tolist") else list(splits)
    except (TypeError, ValueError, RuntimeError):
        rows = None
    sound = isinstance(rows, list) and all(
        isinstance(row, int) and not isinstance(row, bool) and abs(row) < 2**63 for row in rows
    )
    if rows is None or not sound:
        raise ValueError(
            f"splits is {shown(splits)}, of type {type(splits).__name__}: pass the rows for each "
            "member, one integer each, or None for equal parts"
        )
    return tuple(rows)


@overload
def alltoall(
    tensor: T,
    splits: None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> T: ...
@overload
def alltoall(
    tensor: T,
    splits: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> tuple[T, Rows]: ...
def alltoall(*args: Any, **kwargs: Any) -> Any:
    """See below."""
    output, received = alltoall_async(*args, **kwargs).wait()
    splits = args[1] if len(args) > 1 else kwargs.get("splits")
    return output if splits is None else (output, received)


alltoall.__doc__ = of_waiting(alltoall_async.__doc__ or "")
alltoall.__wrapped__ = alltoall_async  # type: ignore[attr-defined]  # whose signature it has

scatter = _blocking(scatter_async)
