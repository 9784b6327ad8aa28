# SPDX-License-Identifier: Apache-2.0
"""allreduce on torch tensors, in all its forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from farandole import ops
from farandole.calls.arguments import shown
from farandole.calls.door import collective, collective_then
from farandole.calls.handles import Handle
from farandole.calls.requests import Op
from farandole.ops import Average, Sum, _blocking, _single
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.autograd import differentiable
from farandole.torch.compression import Compression, Compressor, compressed, restored

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _reduce_op(op: int | None, average: bool | None) -> int:
    """The reduction of a call; `average` is the deprecated way to say it."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(
            f"op is {shown(op)} and average is {shown(average)}: pass one of the two, not both; "
            "average is deprecated"
        )
    warnings.warn(
        "average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4
    )
    return Average if average else Sum


@collective(Op.ALLREDUCE)
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """postscale_factor * op(prescale_factor * x) over the ranks; `op` None is Average.

    Gives a handle for new tensors; not differentiable. Any shape, equal on all ranks. Members of a
    list are reduced together, all or none. `average` is a deprecated form of `op`.
    """
    return ops.grouped_allreduce_async(
        tensors,
        op=_reduce_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


@collective(Op.ALLREDUCE)
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As allreduce, in place: contiguous tensors, not to be touched until the handle is done.

    Not differentiable, but leaves that require a gradient are welcome.
    """
    return ops.grouped_allreduce_async_(
        tensors,
        op=_reduce_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


allreduce_async = _single(grouped_allreduce_async)
allreduce_async_ = _single(grouped_allreduce_async_)
allreduce_ = _blocking(allreduce_async_)
grouped_allreduce_ = _blocking(grouped_allreduce_async_)


@collective_then(Op.ALLREDUCE)
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], list[Tensor]]:
    """postscale_factor * op(prescale_factor * x) over the ranks; `op` None is Average.

    Gives new tensors, differentiable for Average and Sum: the gradients are reduced as the tensors
    were. Members of a list are reduced together. `average` is a deprecated form of `op`.
    """
    op = _reduce_op(op, average)
    factors = (prescale_factor, postscale_factor)
    wires = [compressed(compression, x) for x in tensors]

    def meet() -> list[Tensor]:
        results = _allreduce([wire for wire, _ in wires], name, op, factors, process_set)
        return restored(compression, results, wires)

    return meet


@collective_then(Op.ALLREDUCE)
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """As grouped_allreduce, for one tensor."""
    op = _reduce_op(op, average)
    factors = (prescale_factor, postscale_factor)
    wire, context = compressed(compression, tensor)

    def meet() -> Tensor:
        (result,) = _allreduce([wire], name, op, factors, process_set)
        return compression.decompress(result, context)

    return meet


def _allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        if len(xs) == 1:  # a call that may come again
            return [allreduce_async(xs[0], None, name, op, *factors, process_set).wait()]
        return grouped_allreduce_async(xs, None, name, op, *factors, process_set).wait()

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        if op not in (Average, Sum):
            raise NotImplementedError("allreduce has a gradient for Average and Sum only")
        return _allreduce(gs, back, op, factors, process_set)

    return differentiable("allreduce", name, process_set, tensors, run, gradient)
