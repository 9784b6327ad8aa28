# SPDX-License-Identifier: Apache-2.0
"""Differentiable reducescatter. Any thread may call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from farandole import ops
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.calls.rows import kept
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average, Sum
from farandole.torch.collectives.autograd import differentiable
from farandole.torch.collectives.exchange import gathered, placed
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
    """Returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Tensors need at least one dimension. Shape and dtype must be equal on all ranks. If rows do not
    divide evenly, the first ranks get one row more. A result may be empty. The result is a new
    tensor, which is differentiable if op is Average or Sum. As in Horovod, the gradient is the
    concatenation of all ranks' gradients. For Sum, it is multiplied by the number of ranks.

    - tensor: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or your
      own class.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

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
    """Returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Tensors need at least one dimension. Shapes and dtypes must be equal on all ranks. If rows do
    not divide evenly, the first ranks get one row more. A result may be empty. The results are new
    tensors, which are differentiable if op is Average or Sum. As in Horovod, a gradient is the
    concatenation of all ranks' gradients. For Sum, it is multiplied by the number of ranks.

    - tensors: integers, floats, bool or complex, on a CPU or GPU.
    - name: calls with the same name are matched; unnamed calls are matched in order.
    - process_set: the ranks that take part.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16, or your
      own class.
    - op: Average (the default), Sum, Min, Max or Product.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

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
