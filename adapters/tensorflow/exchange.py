# SPDX-License-Identifier: Apache-2.0
"""alltoall, reducescatter and barrier for TensorFlow tensors, eagerly and inside tf.function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import ops
from farandole.calls.public_call import then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops import Average, Sum
from farandole.tensorflow.collectives import gathered, reducing, scaled
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.forms import any_rows, public, tensors_of
from farandole.tensorflow.graph import barrier_node, differentiable, evaluated_when_run, next_name
from farandole.tensorflow.rows import kept, parts, scatter_returned, table_like

__all__ = ["alltoall", "barrier", "grouped_reducescatter", "reducescatter"]


@public(Op.ALLTOALL)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Sends rows to each member, and receives rows from each member.

    Member i gets the next `splits[i]` rows of the tensor. The result holds the received rows in
    rank order. Tensors need at least one dimension. The dtype and all dimensions but the first must
    be equal on all ranks. Returns a new tensor. With `splits`, also returns the number of rows from
    each member, as int32. The backward pass sends gradients back to the ranks that sent the rows.

    - tensor: a TensorFlow tensor, a variable, or a value that converts to a tensor.
    - splits: the number of rows for each member, in member order. None means equal parts.
    - name, process_set: calls match by name, else by order, within this set.
    - ignore_name_scope: ignored, but accepted for compatibility with Horovod.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.alltoall(tf.range(3)).numpy()
        array([0, 1, 2], dtype=int32)
    """
    (x,) = tensors_of([tensor])
    given = [] if splits is None else [tf.convert_to_tensor(splits)]
    outputs: list[Any] = []  # the received rows, and every member's number of rows

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        chosen = np.asarray(xs[1]) if given else None
        handle = ops.alltoall_async(xs[0], chosen, name, process_set, timeout=timeout)
        output, received = handle.wait()
        return [output, table_like(output, received, np.int32)]

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        home, received = alltoall(gs[0], outputs[1], name=back, process_set=process_set)
        members = evaluated_when_run(process_set.size)
        sent = parts(given[0] if given else None, tf.shape(x, tf.int64)[0], members)
        return [scatter_returned(home, received, sent, x), *(tf.zeros_like(s) for s in given)]

    def meet() -> Any:
        tensors, types = [x, *given], [x.dtype, tf.int32]
        shapes = [*any_rows([x]), (None,)]
        outputs[:] = differentiable(
            Op.ALLTOALL, name, process_set, tensors, run, gradient, shapes, types
        )
        return (outputs[0], outputs[1]) if given else outputs[0]

    return then(meet)


@public(Op.BARRIER)
def barrier(
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Waits until every member has called it. Inside tf.function, the call's graph node waits.

    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.barrier()
    """
    if tf.executing_eagerly():
        return then(lambda: ops.barrier(process_set, name=name, timeout=timeout))
    chosen = next_name(Op.BARRIER, count=True) if name is None else name
    meet = functools.partial(ops.barrier, process_set, name=chosen, timeout=timeout)
    return then(lambda: barrier_node(meet))


@public(Op.REDUCESCATTER)
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> list[Any]:
    """Reduces arrays. Returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Tensors need at least one dimension. Shapes and dtypes must be equal on all ranks. If rows do
    not divide evenly, the first ranks get one row more. Every op except Adasum works. Returns new
    tensors. For Average and Sum, as in Horovod, a tensor's gradient is the concatenation of all
    ranks' gradients. For Sum, it is multiplied by the number of ranks.

    - tensors: a list of TensorFlow tensors, variables, or values that convert to tensors.
    - device_dense: ignored, but accepted for compatibility with Horovod.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16.
    - op: Average (the default), Sum, Min, Max or Product.
    - name, process_set: calls match by name, else by order, within this set.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_reducescatter([tf.range(3)], op=hvd.Sum)
        [<tf.Tensor: shape=(3,), dtype=int32, numpy=array([0, 1, 2], dtype=int32)>]
    """
    xs, factors = tensors_of(tensors), (prescale_factor, postscale_factor)
    return then(lambda: _reducescatter(xs, compression, op, factors, name, process_set, timeout))


@public(Op.REDUCESCATTER)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    timeout: float | None = None,
) -> Any:
    """Reduces arrays. Returns this rank's rows of postscale_factor * op(prescale_factor * x).

    Tensors need at least one dimension. Shapes and dtypes must be equal on all ranks. If rows do
    not divide evenly, the first ranks get one row more. Every op except Adasum works. Returns a new
    tensor. For Average and Sum, as in Horovod, its gradient is the concatenation of all ranks'
    gradients. For Sum, it is multiplied by the number of ranks.

    - tensor: a TensorFlow tensor, a variable, or a value that converts to a tensor.
    - device_dense: ignored, but accepted for compatibility with Horovod.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16.
    - op: Average (the default), Sum, Min, Max or Product.
    - name, process_set: calls match by name, else by order, within this set.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.reducescatter(tf.range(3), op=hvd.Sum).numpy()
        array([0, 1, 2], dtype=int32)
    """
    xs, factors = tensors_of([tensor]), (prescale_factor, postscale_factor)
    return then(lambda: _reducescatter(xs, compression, op, factors, name, process_set, timeout)[0])


def _reducescatter(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
) -> list[Any]:
    sent = [compression.compress(x) for x in tensors]
    encoded = [x for x, _ in sent]
    run = reducing(ops.grouped_reducescatter, op, factors, process_set, timeout)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        if op not in (Average, Sum):
            raise NotImplementedError("reducescatter is differentiable for Average and Sum only")
        members = evaluated_when_run(process_set.size)
        scale = factors[0] * factors[1] * tf.cast(members if op == Sum else 1, tf.float64)
        found = []
        for rows, received, x in zip(*gathered(gs, back, process_set), encoded, strict=True):
            home = scatter_returned(rows, received, kept(tf.shape(x, tf.int64)[0], members), x)
            found.append(scaled(home, scale))
        return found

    shapes = any_rows(tensors)
    results = differentiable(Op.REDUCESCATTER, name, process_set, encoded, run, gradient, shapes)
    pairs = zip(results, sent, strict=True)
    return [compression.decompress(y, context) for y, (_, context) in pairs]
