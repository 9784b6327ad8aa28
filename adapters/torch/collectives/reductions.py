# SPDX-License-Identifier: Apache-2.0
"""allreduce on torch tensors, in all its forms: public calls, for any thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from farandole import ops
from farandole.calls.arguments import shown
from farandole.calls.forms import blocking, one_of, single
from farandole.calls.handles import Handle
from farandole.calls.public_call import collective, collective_then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average, Sum
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.compression import Compression, Compressor, compressed


def _reduce_op(op: int | None, average: bool | None) -> int:
    """The reduction of a call; `average` is the deprecated argument for it."""
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
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Not differentiable. `average` is a deprecated form of `op`. Returns a handle, whose wait() gives
    new tensors of the same shape and dtype.

    Examples:
        >>> hvd.grouped_allreduce_async([torch.ones(2)], op=hvd.Sum, prescale_factor=3.0).wait()
        [tensor([3., 3.])]
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
    """Tensors become postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous, of equal shape and dtype on all ranks; nobody else may touch them until the call is
    done. Not differentiable, but takes leaves that require a gradient. `average` is a deprecated
    form of `op`. Returns a handle, whose wait() gives these very tensors.

    Examples:
        >>> hvd.grouped_allreduce_async_([torch.ones(2)], op=hvd.Sum).wait()
        [tensor([1., 1.])]
    """
    return ops.grouped_allreduce_async_(
        tensors,
        op=_reduce_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


allreduce_async = single(grouped_allreduce_async)
allreduce_async_ = single(grouped_allreduce_async_)
allreduce_ = blocking(allreduce_async_)
grouped_allreduce_ = blocking(grouped_allreduce_async_)


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
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns new tensors, differentiable for Average and Sum: gradients are reduced as the tensors
    were. `average` is a deprecated form of `op`.

    Examples:
        >>> hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum, postscale_factor=3.0)
        [tensor([3., 3.])]
    """
    chosen = _reduce_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return compressed(
        compression, tensors, lambda xs: _allreduce(xs, name, chosen, factors, process_set)
    )


allreduce = one_of(grouped_allreduce)


def _allreduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        if len(xs) == 1:  # a call that may be repeated
            return [allreduce_async(xs[0], None, name, op, *factors, process_set).wait()]
        return grouped_allreduce_async(xs, None, name, op, *factors, process_set).wait()

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        return _allreduce(gs, back, op, factors, process_set)

    return differentiable("allreduce", name, process_set, tensors, run, gradient, op)
