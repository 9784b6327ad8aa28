# SPDX-License-Identifier: Apache-2.0
"""Differentiable allreduce. Any thread may call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from farandole import ops
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops.starts import reduce_op_of
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.compression import Compression, Compressor, compressed


@collective(Op.ALLREDUCE)
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Tensor:
    """Returns postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shape and dtype must be equal on all ranks. The result is a new tensor, which is differentiable
    if op is Average or Sum. Gradients are then reduced in the same way as the tensors.

    - tensor: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or your
      own class.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; `average` is deprecated.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum, postscale_factor=3.0)
        tensor([3., 3.])
    """
    factors = (prescale_factor, postscale_factor)
    meet = _prepared([tensor], average, name, compression, op, factors, process_set, timeout)
    return then(lambda: meet()[0])


@collective(Op.ALLREDUCE)
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[Tensor]:
    """Returns postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shapes and dtypes must be equal on all ranks. The list is one call, which succeeds or fails as a
    whole. The results are new tensors, which are differentiable if op is Average or Sum. Gradients
    are then reduced in the same way as the tensors.

    - tensors: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or your
      own class.
    - op: Average (the default), Sum, Min, Max, Product or Adasum; `average` is deprecated.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce([torch.ones(2)], op=hvd.Sum, postscale_factor=3.0)
        [tensor([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    meet = _prepared(tensors, average, name, compression, op, factors, process_set, timeout)
    return then(meet)


def _prepared(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    compression: Compressor,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None,
) -> Callable[[], list[Tensor]]:
    chosen = reduce_op_of(op, average)

    def reduce(xs: Sequence[Tensor]) -> list[Tensor]:
        return _reduced(xs, name, chosen, factors, process_set, timeout)

    return compressed(compression, tensors, reduce)


def _reduced(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None = None,
) -> list[Tensor]:
    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        if len(xs) == 1:  # this form can reuse a prepared call if the call is repeated
            return [_reduced_one(xs[0], name, op, factors, process_set, timeout)]
        terms = (None, name, op, *factors, process_set)
        return ops.grouped_allreduce_async(xs, *terms, timeout=timeout).wait()

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        return _reduced(gs, back, op, factors, process_set)

    return differentiable("allreduce", name, process_set, tensors, run, gradient, op)


def _reduced_one(
    x: Tensor,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None,
) -> Tensor:
    before, after = factors
    return ops.allreduce(
        x,
        None,
        name,
        op=op,
        prescale_factor=before,
        postscale_factor=after,
        process_set=process_set,
        timeout=timeout,
    )
