# SPDX-License-Identifier: Apache-2.0
"""reducescatter and scatter on torch tensors, in all their forms: public calls, for any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from farandole import ops, topology
from farandole.calls.forms import one_of, single
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, collective_then
from farandole.calls.requests import Op
from farandole.calls.rows import kept, parts, splits_of
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average, Sum
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.collectives.exchange import exchanged, gathered, placed
from farandole.torch.compression import Compression, Compressor, compressed

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
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more; a result may have none. Any op but Adasum. Not differentiable. Returns a
    handle, whose wait() gives new tensors.

    Examples:
        >>> hvd.grouped_reducescatter_async([torch.arange(3)], op=hvd.Sum).wait()
        [tensor([0, 1, 2])]
    """
    return ops.grouped_reducescatter_async(
        tensors,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


reducescatter_async = single(grouped_reducescatter_async)


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
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more; a result may have none. Any op but Adasum. Returns new tensors,
    differentiable for Average and Sum. The gradient is as in Horovod: all ranks' gradients
    concatenated, times the number of ranks for Sum.

    Examples:
        >>> hvd.grouped_reducescatter([torch.arange(3)], op=hvd.Sum)
        [tensor([0, 1, 2])]
    """
    factors = (prescale_factor, postscale_factor)
    return compressed(
        compression, tensors, lambda xs: _reducescatter(xs, name, op, factors, process_set)
    )


reducescatter = one_of(grouped_reducescatter)


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
        triples = zip(*gathered(gs, back, process_set), tensors, strict=True)
        return [placed(rows, came, kept(len(x), members), x) * scale for rows, came, x in triples]

    return differentiable("reducescatter", name, process_set, tensors, run, gradient, op)


# ---- scatter


@collective(Op.SCATTER)
def scatter_async(
    tensor: Tensor,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """This rank's rows of the tensor of `root_rank`.

    Member i gets `splits[i]` rows; only the root's splits count. On the other ranks `tensor` tells
    the device, dtype and all dimensions but the first, for example torch.empty(0, 3). Not
    differentiable. Returns a handle, whose wait() gives a new tensor.

    Examples:
        >>> hvd.scatter_async(torch.arange(3), root_rank=0, splits=[3]).wait()
        tensor([0, 1, 2])
    """
    return ops.scatter_async(tensor, root_rank, splits, name=name, process_set=process_set)


@collective_then(Op.SCATTER)
def scatter(
    tensor: Tensor,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """This rank's rows of the tensor of `root_rank`.

    Member i gets `splits[i]` rows; only the root's splits count. On the other ranks `tensor` tells
    the device, dtype and all dimensions but the first, for example torch.empty(0, 3). Returns a new
    tensor, differentiable if all ranks' tensors require a gradient: the root gets the gradients of
    all rows, the others zeros.

    Examples:
        >>> hvd.scatter(torch.arange(3), root_rank=0)
        tensor([0, 1, 2])
    """

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        return [scatter_async(xs[0], root_rank, splits, name, process_set).wait()]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        members = process_set.ranks or []
        to_root = [len(gs[0]) if rank == root_rank else 0 for rank in members]
        rows, table = exchanged(gs[0], to_root, back, process_set)
        came = table.tolist()
        sent = parts(given, len(tensor), len(members)) if topology.rank() == root_rank else came
        return [placed(rows, came, sent, tensor)]

    given = splits_of(splits)
    return lambda: differentiable("scatter", name, process_set, [tensor], run, gradient)[0]
