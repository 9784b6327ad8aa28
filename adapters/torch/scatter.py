# SPDX-License-Identifier: Apache-2.0
"""reducescatter and scatter on torch tensors, in all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import exchange, ops
from farandole.calls.door import collective, collective_then
from farandole.calls.handles import Handle
from farandole.calls.requests import Op
from farandole.ops import Average, Sum, _single
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.autograd import differentiable
from farandole.torch.compression import Compression, Compressor, compressed, restored
from farandole.torch.exchange import allgather, alltoall

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "scatter",
    "scatter_async",
]


# ---- reducescatter


@collective(Op.REDUCESCATTER)
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """This rank's rows of the average or sum over the ranks.

    Where the first dimension does not divide evenly, low ranks get one row more; a result may have
    no rows. Not differentiable.
    """
    return ops.grouped_reducescatter_async(
        tensors,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


reducescatter_async = _single(grouped_reducescatter_async)


@collective_then(Op.REDUCESCATTER)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Callable[[], list[Tensor]]:
    """This rank's rows of the average or sum, differentiable.

    The gradient is that of Horovod: all ranks' gradients concatenated, times the number of ranks
    for Sum.
    """
    wires = [compressed(compression, x) for x in tensors]
    factors = (prescale_factor, postscale_factor)

    def meet() -> list[Tensor]:
        results = _reducescatter([wire for wire, _ in wires], name, op, factors, process_set)
        return restored(compression, results, wires)

    return meet


@collective_then(Op.REDUCESCATTER)
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Callable[[], Tensor]:
    """As grouped_reducescatter, for one tensor."""
    wire, context = compressed(compression, tensor)
    factors = (prescale_factor, postscale_factor)

    def meet() -> Tensor:
        (result,) = _reducescatter([wire], name, op, factors, process_set)
        return compression.decompress(result, context)

    return meet


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return grouped_reducescatter_async(xs, name, op, process_set, *factors).wait()

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        members = process_set.size() or 1
        scale = factors[0] * factors[1] * (members if op == Sum else 1)
        named = enumerate(gs)
        return [allgather(g, f"{back}.{i}", process_set) * scale for i, g in named]

    return differentiable("reducescatter", name, process_set, tensors, run, gradient)


# ---- scatter


@collective(Op.SCATTER)
def scatter_async(
    tensor: Tensor,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """This rank's rows of the tensor of `root_rank`, a rank of the world: a new tensor.

    Member i gets `splits[i]` rows, equal parts without splits; only the root's splits count. On the
    other ranks `tensor` says what to receive, its device, dtype and all dimensions but the first:
    torch.empty(0, 3). Not differentiable.
    """
    return exchange.scatter_async(tensor, root_rank, splits, name=name, process_set=process_set)


@collective_then(Op.SCATTER)
def scatter(
    tensor: Tensor,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """As scatter_async, waited for, differentiable where all ranks' tensors require a gradient.

    The gradients go back to the root, each to its rows; on the other ranks they are zeros.
    """

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return [scatter_async(xs[0], root_rank, splits, name, process_set).wait()]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        to_root = [len(gs[0]) if rank == root_rank else 0 for rank in process_set.ranks or ()]
        rows, _ = alltoall(gs[0], to_root, back, process_set)
        unsent = tensor.new_zeros((len(tensor) - len(rows), *tensor.shape[1:]))
        return [torch.cat([rows, unsent])]

    return lambda: differentiable("scatter", name, process_set, [tensor], run, gradient)[0]
