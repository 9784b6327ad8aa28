# SPDX-License-Identifier: Apache-2.0
"""reducescatter on torch tensors, in all its forms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farandole import ops
from farandole.handles import Handle
from farandole.ops import Average, Sum, _single
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.autograd import differentiable, gradient_name
from farandole.torch.compression import Compression, Compressor
from farandole.torch.exchange import allgather

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


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


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of the average or sum, differentiable.

    The gradient is that of Horovod: all ranks' gradients concatenated, times the number of ranks
    for Sum.
    """
    wires = [compression.compress(x) for x in tensors]
    back = gradient_name("reducescatter", name, process_set)
    members = process_set.size()
    scale = prescale_factor * postscale_factor * ((members or 1) if op == Sum else 1)

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        factors = (prescale_factor, postscale_factor)
        return grouped_reducescatter_async(xs, name, op, process_set, *factors).wait()

    def gradient(gs: Sequence[Tensor]) -> list[Tensor]:
        named = enumerate(gs)
        return [allgather(g, f"{back}.{i}", process_set) * scale for i, g in named]

    results = differentiable([wire for wire, _ in wires], run, gradient)
    pairs = zip(results, wires, strict=True)
    return [compression.decompress(result, context) for result, (_, context) in pairs]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """As grouped_reducescatter, for one tensor."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]
