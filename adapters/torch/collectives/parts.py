# SPDX-License-Identifier: Apache-2.0
"""reducescatter and scatter on torch tensors, differentiable: public calls, for any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from farandole import ops, topology
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.calls.rows import kept, parts, splits_of
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average, Sum
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.collectives.exchange import exchanged, gathered, placed
from farandole.torch.compression import Compression, Compressor, compressed


@collective(Op.REDUCESCATTER)
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> Tensor:
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more; a result may have none. Returns a new tensor, differentiable for Average
    and Sum. The gradient is as in Horovod: all ranks' gradients concatenated, times the number of
    ranks for Sum.

    - tensor: integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or a class of
      yours.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reducescatter(torch.arange(3), op=hvd.Sum)
        tensor([0, 1, 2])
    """
    factors = (prescale_factor, postscale_factor)
    meet = _prepared([tensor], name, compression, op, process_set, factors, timeout)
    return then(lambda: meet()[0])


@collective(Op.REDUCESCATTER)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> list[Tensor]:
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more; a result may have none. Returns new tensors, differentiable for Average
    and Sum. The gradient is as in Horovod: all ranks' gradients concatenated, times the number of
    ranks for Sum.

    - tensors: integers, floats, bool or complex, on a CPU or GPU.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or a class of
      yours.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reducescatter([torch.arange(3)], op=hvd.Sum)
        [tensor([0, 1, 2])]
    """
    factors = (prescale_factor, postscale_factor)
    meet = _prepared(tensors, name, compression, op, process_set, factors, timeout)
    return then(meet)


def _prepared(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Compressor,
    op: int | None,
    process_set: ProcessSet,
    factors: tuple[float, float],
    timeout: float | None,
) -> Callable[[], list[Tensor]]:
    chosen = Average if op is None else op

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        terms = (name, chosen, process_set, *factors)
        return ops.grouped_reducescatter_async(xs, *terms, timeout=timeout).wait()

    def reduce(xs: Sequence[Tensor]) -> list[Tensor]:
        def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
            members = process_set.size() or 1
            scale = factors[0] * factors[1] * (members if chosen == Sum else 1)
            triples = zip(*gathered(gs, back, process_set), xs, strict=True)
            return [placed(g, came, kept(len(x), members), x) * scale for g, came, x in triples]

        return differentiable("reducescatter", name, process_set, xs, run, gradient, chosen)

    return compressed(compression, tensors, reduce)


@collective(Op.SCATTER)
def scatter(
    tensor: Tensor,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Tensor:
    """This rank's rows of the tensor of `root_rank`.

    Member i gets `splits[i]` rows. Returns a new tensor, differentiable if all ranks' tensors
    require a gradient: the root gets the gradients of all rows, the others zeros.

    - tensor: the root's rows. On the other ranks it tells the device, dtype and all dimensions but
      the first, for example torch.empty(0, 3).
    - root_rank: the rank of the world that sends.
    - splits: integers, the rows for each member, in member order; None: equal parts. Only the
      root's count.
    - name, process_set: calls of one name meet, others by their order, in this set of ranks.
    - timeout: seconds, after which the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.scatter(torch.arange(3), root_rank=0)
        tensor([0, 1, 2])
    """

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        terms = (root_rank, splits, name, process_set)
        return [ops.scatter(xs[0], *terms, timeout=timeout)]

    def gradient(gs: Sequence[Tensor], back: str) -> list[Tensor]:
        members = process_set.ranks or []
        to_root = [len(gs[0]) if rank == root_rank else 0 for rank in members]
        rows, table = exchanged(gs[0], to_root, back, process_set)
        came = table.tolist()
        sent = parts(given, len(tensor), len(members)) if topology.rank() == root_rank else came
        return [placed(rows, came, sent, tensor)]

    given = splits_of(splits)
    return then(lambda: differentiable("scatter", name, process_set, [tensor], run, gradient)[0])
