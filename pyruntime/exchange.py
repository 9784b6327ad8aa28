# SPDX-License-Identifier: Apache-2.0
"""alltoall and scatter: rows that go to members by splits; arguments and errors as in ops."""

from __future__ import annotations

from operator import index
from typing import Any, TypeVar

import numpy as np

from farandole.calls.arguments import shown
from farandole.calls.door import collective
from farandole.calls.handles import Handle, take
from farandole.calls.requests import Call, Op, submit
from farandole.ops import _blocking, _handle, _start, describe
from farandole.process_sets import ProcessSet, global_process_set, set_id

__all__ = ["alltoall", "alltoall_async", "scatter", "scatter_async"]

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
    """Sends `splits[i]` rows to member i (None: equal parts) and receives in rank order.

    The handle's result is (output, rows received from each member).
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

    Member i gets `splits[i]` rows (None: equal parts), one after the other; only the root's splits
    count. On the other ranks `tensor` says what to receive: its kind, device, dtype and all
    dimensions but the first, of which there may be none, as in numpy.empty((0, 3), "float32").
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


def alltoall(*args: Any, **kwargs: Any) -> Any:
    """As alltoall_async, waited for: (output, received rows), or output alone without splits."""
    output, received = alltoall_async(*args, **kwargs).wait()
    splits = args[1] if len(args) > 1 else kwargs.get("splits")
    return output if splits is None else (output, received)


alltoall.__wrapped__ = alltoall_async  # type: ignore[attr-defined]  # whose signature it has

scatter = _blocking(scatter_async)
