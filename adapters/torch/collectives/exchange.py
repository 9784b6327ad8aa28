# SPDX-License-Identifier: Apache-2.0
"""allgather, broadcast and alltoall on torch tensors, in all their forms: public calls, for any
thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from farandole import ops, topology
from farandole.calls.forms import blocking, one_of, single
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, collective_then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average
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
    return lambda: _allgather(members, name, process_set)


allgather = one_of(grouped_allgather)


def _allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> list[Tensor]:
    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return grouped_allgather_async(xs, name, process_set).wait()

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        means = grouped_allreduce(gs, name=back, op=Average, process_set=process_set)
        starts = _first_rows([len(x) for x in tensors], f"{back}.rows", process_set)
        rows = zip(means, starts, tensors, strict=True)
        return [mean.narrow(0, start, len(x)) for mean, start, x in rows]

    return differentiable("allgather", name, process_set, tensors, run, gradient)


def _first_rows(rows: Sequence[int], name: str, process_set: ProcessSet) -> list[int]:
    """This rank's first row in each result of allgathers of so many rows; collective."""
    own = torch.tensor([list(rows)])
    table = allgather_async(own, name, process_set).wait()
    before: list[int] = table[: process_set.rank() or 0].sum(0).tolist()
    return before


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

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return [broadcast_async(xs[0], root_rank, name, process_set).wait()]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        means = grouped_allreduce(gs, name=back, op=Average, process_set=process_set)
        return means if topology.rank() == root_rank else [torch.zeros_like(means[0])]

    return lambda: differentiable("broadcast", name, process_set, [tensor], run, gradient)[0]


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
    int32 on the device of the splits).

    Examples:
        >>> hvd.alltoall_async(torch.arange(3), splits=[3]).wait()
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    return ops.alltoall_async(tensor, splits, name=name, process_set=process_set).map(
        lambda both: (both[0], torch.from_numpy(both[1]).to(device, torch.int32))
    )


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
    `splits` it returns (the tensor, the rows from each member as int32 on the splits' device).

    Examples:
        >>> hvd.alltoall(torch.arange(3))
        tensor([0, 1, 2])
        >>> hvd.alltoall(torch.arange(3), splits=[3])
        (tensor([0, 1, 2]), tensor([3], dtype=torch.int32))
    """
    received = torch.empty(0)

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        nonlocal received
        output, received = alltoall_async(xs[0], splits, name, process_set).wait()
        return [output]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        back_home, _ = alltoall(gs[0], received, back, process_set)
        unsent = tensor.new_zeros((len(tensor) - len(back_home), *tensor.shape[1:]))
        return [torch.cat([back_home, unsent])]

    def meet() -> Any:
        (output,) = differentiable("alltoall", name, process_set, [tensor], run, gradient)
        return output if splits is None else (output, received)

    return meet
