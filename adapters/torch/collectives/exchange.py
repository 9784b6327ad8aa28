# SPDX-License-Identifier: Apache-2.0
"""allgather, broadcast, reduce and alltoall on torch tensors, in all their forms: public calls, for
any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from farandole import ops, topology
from farandole.calls.arguments import divisor_of
from farandole.calls.forms import blocking, one_of, single
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, collective_then
from farandole.calls.requests import Op
from farandole.calls.rows import Table, parts, places, splits_of
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Average, Sum
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.collectives.reductions import grouped_allreduce

# ---- allgather


@collective(Op.ALLGATHER)
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """All ranks' tensors, concatenated along the first dimension in rank order.

    At least one dimension; only the first may differ between ranks. Any dtype, equal on all ranks.
    Not differentiable. Returns a handle, whose wait() gives new tensors.

    Examples:
        >>> hvd.grouped_allgather_async([torch.arange(3)]).wait()
        [tensor([0, 1, 2])]
    """
    return ops.grouped_allgather_async(tensors, name=name, process_set=process_set)


allgather_async = single(grouped_allgather_async)


@collective_then(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], list[Tensor]]:
    """All ranks' tensors, concatenated along the first dimension in rank order.

    At least one dimension; only the first may differ between ranks. Any dtype, equal on all ranks.
    Returns new tensors, differentiable. The gradient is as in Horovod: this rank's rows of the
    gradients' average over the ranks.

    Examples:
        >>> hvd.grouped_allgather([torch.arange(3)])
        [tensor([0, 1, 2])]
    """
    members = list(tensors)
    return lambda: gathered(members, name, process_set)[0]


allgather = one_of(grouped_allgather)


def gathered(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> tuple[list[Tensor], list[Table]]:
    """The results of grouped_allgather(), and the rows of each by member."""
    tables: list[Table] = []

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        pairs = ops._grouped_allgather_async(xs, name=name, process_set=process_set).wait()
        tables[:] = [rows for _, rows in pairs]
        return [result for result, _ in pairs]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        means = grouped_allreduce(gs, name=back, op=Average, process_set=process_set)
        own = process_set.rank() or 0
        pairs = zip(means, tables, strict=True)
        return [mean.narrow(0, sum(rows[:own]), rows[own]) for mean, rows in pairs]

    return differentiable("allgather", name, process_set, tensors, run, gradient), tables


def placed(rows: Tensor, came: Sequence[int], sent: Sequence[int], like: Tensor) -> Tensor:
    """The gradient of a tensor like `like` from its `rows` that came back, `came` by member, of
    those that were `sent`. Others are zeros: they went nowhere, or to a member that has joined."""
    if len(rows) == len(like):
        return rows
    at = torch.from_numpy(places(came, sent)).to(rows.device)
    return rows.new_zeros(like.shape).index_copy(0, at, rows)


# ---- broadcast


@collective(Op.BROADCAST)
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """The tensor of `root_rank`. Any shape and dtype, equal on all ranks. Not differentiable.

    Returns a handle, whose wait() gives a new tensor.

    Examples:
        >>> hvd.broadcast_async(torch.arange(3), root_rank=0).wait()
        tensor([0, 1, 2])
    """
    return ops.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


@collective(Op.BROADCAST)
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """The tensor gets the values of `root_rank`, in place.

    Contiguous, of equal shape and dtype on all ranks; nobody else may touch it until the call is
    done. Not differentiable. Returns a handle, whose wait() gives this very tensor.

    Examples:
        >>> hvd.broadcast_async_(torch.arange(3), root_rank=0).wait()
        tensor([0, 1, 2])
    """
    return ops.broadcast_async_(tensor, root_rank, name=name, process_set=process_set)


broadcast_ = blocking(broadcast_async_)


@collective_then(Op.BROADCAST)
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """The tensor of `root_rank`. Any shape and dtype, equal on all ranks.

    Returns a new tensor, differentiable. The gradient is as in Horovod: on the root the gradients'
    average over the ranks, else zeros.

    Examples:
        >>> hvd.broadcast(torch.arange(3), root_rank=0)
        tensor([0, 1, 2])
    """
    return lambda: _broadcast([tensor], root_rank, name, process_set)[0]


def _broadcast(
    tensors: Sequence[Tensor],
    root: int,
    name: str | None,
    process_set: ProcessSet,
    back_op: int = Average,
) -> list[Tensor]:
    """`back_op`: of the gradients."""

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        if len(xs) == 1:  # a call that may be repeated
            return [broadcast_async(xs[0], root, name, process_set).wait()]
        return ops.grouped_broadcast(xs, root, name=name, process_set=process_set)

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        found = grouped_allreduce(gs, name=back, op=back_op, process_set=process_set)
        return found if topology.rank() == root else [torch.zeros_like(x) for x in found]

    return differentiable("broadcast", name, process_set, tensors, run, gradient)


# ---- reduce

grouped_reduce_, grouped_reduce_async = ops.grouped_reduce_, ops.grouped_reduce_async
grouped_reduce_async_ = ops.grouped_reduce_async_
reduce_, reduce_async, reduce_async_ = ops.reduce_, ops.reduce_async, ops.reduce_async_


@collective_then(Op.REDUCE)
def grouped_reduce(
    tensors: Sequence[Tensor],
    root_rank: int,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Callable[[], list[Tensor]]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. Any op but Adasum. A list is reduced together,
    all of it or nothing. Returns new tensors on the root, and elsewhere the tensors that were
    given. Differentiable for Average and Sum: all ranks get the gradient of the root's result; what
    the others make of theirs has none.

    Examples:
        >>> hvd.grouped_reduce([torch.ones(2)], root_rank=0, op=hvd.Sum, postscale_factor=3.0)
        [tensor([3., 3.])]
    """
    chosen = Average if op is None else op

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return ops.grouped_reduce(
            xs,
            root_rank,
            op=chosen,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
            process_set=process_set,
            timeout=timeout,
        )

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        scale = prescale_factor * postscale_factor / divisor_of(chosen, set_id(process_set))
        return [g * scale for g in _broadcast(gs, root_rank, back, process_set, back_op=Sum)]

    members = list(tensors)
    return lambda: differentiable("reduce", name, process_set, members, run, gradient, chosen)


reduce = one_of(grouped_reduce)


# ---- alltoall


@collective(Op.ALLTOALL)
def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    """Sends `splits[i]` rows of the tensor to member i, and receives theirs in rank order.

    At least one dimension; dtype and all dimensions but the first are equal on all ranks. Not
    differentiable. Returns a handle, whose wait() gives (a new tensor, the rows from each member as
    int32 on the device of the splits; as int64 where a number is 2^31 or more).

    Examples:
        >>> hvd.alltoall_async(torch.arange(3), splits=[3]).wait()
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    return ops.alltoall_async(tensor, splits, name=name, process_set=process_set).map(
        lambda both: (both[0], _told(both[1], splits))
    )


def _told(rows: ops.Rows, splits: Any) -> Tensor:
    """Rows from each member as users get them."""
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    dtype = torch.int32 if rows.max() <= torch.iinfo(torch.int32).max else torch.int64
    return torch.from_numpy(rows).to(device, dtype)


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, Tensor]: ...
@collective_then(Op.ALLTOALL)
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """Sends `splits[i]` rows of the tensor to member i, and receives theirs in rank order.

    At least one dimension; dtype and all dimensions but the first are equal on all ranks. Returns a
    new tensor, differentiable: gradients are sent back to the ranks that the rows came from. With
    `splits` it returns (the tensor, the rows from each member as int32 on the splits' device; as
    int64 where a number is 2^31 or more).

    Examples:
        >>> hvd.alltoall(torch.arange(3))
        tensor([0, 1, 2])
        >>> hvd.alltoall(torch.arange(3), splits=[3])
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    given = splits_of(splits)

    def meet() -> Any:
        output, received = exchanged(tensor, given, name, process_set)
        return output if splits is None else (output, _told(received, splits))

    return meet


def exchanged(
    tensor: Tensor, splits: Sequence[int], name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ops.Rows]:
    """The result of alltoall(), and the rows from each member. Without `splits`: equal parts."""
    received = np.empty(0, np.int64)

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        nonlocal received
        chosen = splits or None
        output, received = ops.alltoall_async(
            xs[0], chosen, name=name, process_set=process_set
        ).wait()
        return [output]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        rows, came = exchanged(gs[0], received.tolist(), back, process_set)
        sent = parts(splits, len(tensor), process_set.size() or 1)
        return [placed(rows, came.tolist(), sent, tensor)]

    (output,) = differentiable("alltoall", name, process_set, [tensor], run, gradient)
    return output, received
