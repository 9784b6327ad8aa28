# SPDX-License-Identifier: Apache-2.0
"""Differentiable allgather, broadcast and alltoall. They may be called from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from farandole import ops, topology
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.calls.rows import Table, parts, places, splits_of
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average
from farandole.ops.exchanges import Rows
from farandole.ops.gathers import grouped_allgather_rows
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.collectives.reductions import grouped_allreduce

# ---- allgather


@collective(Op.ALLGATHER)
def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Tensor:
    """Returns all ranks' tensors, concatenated along the first dimension in rank order.

    Tensors need at least one dimension. The dtype and all dimensions but the first must be equal on
    all ranks. The result is a new tensor and is differentiable. As in Horovod, gradients are
    averaged over the ranks, and each rank gets the rows that belong to its own input.

    - tensor: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather(torch.arange(3))
        tensor([0, 1, 2])
    """
    return then(lambda: gathered([tensor], name, process_set, timeout)[0][0])


@collective(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[Tensor]:
    """Returns all ranks' tensors, concatenated along the first dimension in rank order.

    Tensors need at least one dimension. The dtype and all dimensions but the first must be equal on
    all ranks. The results are new tensors and are differentiable. As in Horovod, gradients are
    averaged over the ranks, and each rank gets the rows that belong to its own inputs.

    - tensors: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allgather([torch.arange(3)])
        [tensor([0, 1, 2])]
    """
    members = list(tensors)
    return then(lambda: gathered(members, name, process_set, timeout)[0])


def gathered(
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None = None,
) -> tuple[list[Tensor], list[Table]]:
    """Returns grouped_allgather()'s results and, for each result, every member's number of rows."""
    tables: list[Table] = []

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        common: Any = {"name": name, "process_set": process_set, "timeout": timeout}
        pairs = grouped_allgather_rows(xs, **common).wait()
        tables[:] = [rows for _, rows in pairs]
        return [result for result, _ in pairs]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        means = grouped_allreduce(gs, name=back, op=Average, process_set=process_set)
        own = process_set.rank() or 0
        pairs = zip(means, tables, strict=True)
        return [mean.narrow(0, sum(rows[:own]), rows[own]) for mean, rows in pairs]

    return differentiable("allgather", name, process_set, tensors, run, gradient), tables


def placed(rows: Tensor, came: Sequence[int], sent: Sequence[int], like: Tensor) -> Tensor:
    """Builds a gradient with the shape of `like` from the `rows` that members have returned.

    `came[i]` is the number of rows that member i returned. `sent[i]` is the number of rows that
    were sent to member i. A row is zero if no member received it, or if its receiver had called
    join().
    """
    if len(rows) == len(like):
        return rows
    at = torch.from_numpy(places(came, sent)).to(rows.device)
    return rows.new_zeros(like.shape).index_copy(0, at, rows)


# ---- broadcast


@collective(Op.BROADCAST)
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Tensor:
    """Returns the tensor of `root_rank`. Shape and dtype must be equal on all ranks.

    The result is a new tensor and is differentiable. As in Horovod, the root gets the average of
    the ranks' gradients, and other ranks get zeros.

    - tensor: integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the sender's rank in the world; it must be in the process set.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast(torch.arange(3), root_rank=0)
        tensor([0, 1, 2])
    """

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        terms = (root_rank, name, process_set)
        return [ops.broadcast_async(xs[0], *terms, timeout=timeout).wait()]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        found = grouped_allreduce(gs, name=back, op=Average, process_set=process_set)
        return found if topology.rank() == root_rank else list(map(_dependent_zeros, found))

    return then(lambda: differentiable("broadcast", name, process_set, [tensor], run, gradient)[0])


def _dependent_zeros(x: Tensor) -> Tensor:
    """Returns zeros that depend on `x`.

    With plain zeros, autograd would skip this rank's part in the collective of a second derivative,
    and the root would wait for this rank.
    """
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


# ---- alltoall


@collective(Op.ALLTOALL)
def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[tuple[Tensor, Tensor]]:
    """Starts to send `splits[i]` rows to member i, and to receive rows in rank order.

    The call is not differentiable. Returns a handle whose wait() returns a new tensor and the
    number of rows from each member. The counts are on the device of `splits`. Their dtype is int32,
    or int64 if a count is 2^31 or more.

    - tensor: at least one dimension; dtype and all dimensions but the first are equal on all ranks.
    - splits: the number of rows for each member, in member order. None means equal parts.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall_async(torch.arange(3), splits=[3]).wait()
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    handle = ops.alltoall_async(tensor, splits, name, process_set, timeout=timeout)
    return handle.map(lambda both: (both[0], _told(both[1], splits)))


def _told(rows: Rows, splits: Any) -> Tensor:
    """Returns each member's number of rows as a tensor on the device of `splits`."""
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    dtype = torch.int32 if rows.max() <= torch.iinfo(torch.int32).max else torch.int64
    return torch.from_numpy(rows).to(device, dtype)


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> tuple[Tensor, Tensor]: ...
@collective(Op.ALLTOALL)
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Sends `splits[i]` rows to member i, and receives rows in rank order.

    The result is a new tensor and is differentiable: gradients are sent back to the ranks that the
    rows came from. With `splits`, also returns the number of rows from each member. The counts are
    on the device of `splits`. Their dtype is int32, or int64 if a count is 2^31 or more.

    - tensor: at least one dimension; dtype and all dimensions but the first are equal on all ranks.
    - splits: the number of rows for each member, in member order. None means equal parts.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall(torch.arange(3))
        tensor([0, 1, 2])
        >>> hvd.alltoall(torch.arange(3), splits=[3])
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    given = splits_of(splits)

    def meet() -> Any:
        output, received = exchanged(tensor, given, name, process_set, timeout)
        return output if splits is None else (output, _told(received, splits))

    return then(meet)


def exchanged(
    tensor: Tensor,
    splits: Sequence[int],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None = None,
) -> tuple[Tensor, Rows]:
    """Returns the result of alltoall(), and the number of rows from each member.

    If `splits` is empty, members get equal parts.
    """
    received = np.empty(0, np.int64)

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        nonlocal received
        chosen = splits or None
        handle = ops.alltoall_async(xs[0], chosen, name, process_set, timeout=timeout)
        output, received = handle.wait()
        return [output]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        rows, came = exchanged(gs[0], received.tolist(), back, process_set)
        sent = parts(splits, len(tensor), process_set.size() or 1)
        return [placed(rows, came.tolist(), sent, tensor)]

    (output,) = differentiable("alltoall", name, process_set, [tensor], run, gradient)
    return output, received
