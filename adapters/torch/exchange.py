# SPDX-License-Identifier: Apache-2.0
"""allgather, broadcast and alltoall on torch tensors, in all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import exchange, ops, topology
from farandole.calls.door import collective, collective_then
from farandole.calls.handles import Handle
from farandole.calls.requests import Op
from farandole.ops import Average, _blocking, _single
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.autograd import differentiable
from farandole.torch.reductions import grouped_allreduce

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]


# ---- allgather


@collective(Op.ALLGATHER)
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """All ranks' tensors, concatenated along the first dimension, which may differ, in rank order.

    Not differentiable.
    """
    return ops.grouped_allgather_async(tensors, name=name, process_set=process_set)


allgather_async = _single(grouped_allgather_async)


@collective_then(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], list[Tensor]]:
    """As grouped_allgather_async, waited for, and differentiable.

    The gradient is that of Horovod: this rank's rows of the gradients' average over the ranks.
    """
    members = list(tensors)
    return lambda: _allgather(members, name, process_set)


@collective_then(Op.ALLGATHER)
def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """As grouped_allgather, for one tensor."""
    return lambda: _allgather([tensor], name, process_set)[0]


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
    """Where this rank's rows begin in what an allgather of so many rows gives."""
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
    """The tensor of `root_rank`, a rank of the world also within a process set: a new tensor."""
    return ops.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


@collective(Op.BROADCAST)
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As broadcast, in place: a contiguous tensor, not to be touched until the handle is done."""
    return ops.broadcast_async_(tensor, root_rank, name=name, process_set=process_set)


broadcast_ = _blocking(broadcast_async_)


@collective_then(Op.BROADCAST)
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """The tensor of `root_rank`, a new tensor, differentiable.

    The gradient is that of Horovod: on the root the gradients' average over the ranks, else zeros.
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
    """Sends `splits[i]` rows to member i, equal parts without splits, and receives in rank order.

    The handle gives (output, received rows as int32 on the splits' device), always both.
    """
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    return exchange.alltoall_async(tensor, splits, name=name, process_set=process_set).map(
        lambda both: (both[0], torch.from_numpy(both[1]).to(device, torch.int32))
    )


@collective_then(Op.ALLTOALL)
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """As alltoall_async, waited for, differentiable: the output alone where no splits are given.

    The gradients go back to where the rows came from.
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
