# SPDX-License-Identifier: Apache-2.0
"""alltoall, scatter and barrier on TensorFlow's tensors, as the calls of collectives.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import ops, topology
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.tensorflow.forms import any_rows, public, tensors_of
from farandole.tensorflow.graph import asked_when_run, barrier_node, differentiable, next_name
from farandole.tensorflow.rows import parts, placed, table_like

__all__ = ["alltoall", "barrier", "scatter"]


@public(Op.ALLTOALL)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """Sends `splits[i]` rows of the tensor to member i, and receives theirs in rank order.

    At least one dimension; dtype and all dimensions but the first are equal on all ranks. Returns a
    new tensor, with `splits` also the rows from each member as int32. The gradient sends gradients
    back to the ranks that the rows came from.

    Examples:
        >>> hvd.alltoall(tf.range(3)).numpy()
        array([0, 1, 2], dtype=int32)
    """
    (x,) = tensors_of([tensor])
    given = [] if splits is None else [tf.convert_to_tensor(splits)]
    outputs: list[Any] = []  # rows, and how many came from each member

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        chosen = np.asarray(xs[1]) if given else None
        handle = ops.alltoall_async(xs[0], chosen, name=name, process_set=process_set)
        output, received = handle.wait()
        return [output, table_like(output, received, np.int32)]

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        home, came = alltoall(gs[0], outputs[1], name=back, process_set=process_set)
        members = asked_when_run(process_set.size)
        sent = parts(given[0] if given else None, tf.shape(x, tf.int64)[0], members)
        return [placed(home, came, sent, x), *(tf.zeros_like(s) for s in given)]

    def meet() -> Any:
        tensors, types = [x, *given], [x.dtype, tf.int32]
        shapes = [*any_rows([x]), (None,)]
        outputs[:] = differentiable(
            Op.ALLTOALL, name, process_set, tensors, run, gradient, shapes, types
        )
        return (outputs[0], outputs[1]) if given else outputs[0]

    return meet


@public(Op.SCATTER)
def scatter(
    tensor: Any,
    root_rank: int = 0,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """This rank's rows of the tensor of `root_rank`, a rank of the world: a new tensor.

    Member i gets `splits[i]` rows, a list of integers; only the root's splits count. On the other
    ranks `tensor` tells dtype and all dimensions but the first, for example tf.zeros((0, 3)). The
    gradient gathers the gradients on the root; it is zeros elsewhere.

    Examples:
        >>> hvd.scatter(tf.range(3), root_rank=0).numpy()
        array([0, 1, 2], dtype=int32)
    """
    (x,) = tensors_of([tensor])

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        return [ops.scatter(xs[0], root_rank, splits, name=name, process_set=process_set)]

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        rows, members = tf.shape(gs[0])[0], process_set.ranks or []
        to_root = [rows if rank == root_rank else 0 for rank in members]
        home, came = alltoall(gs[0], tf.stack(to_root), name=back, process_set=process_set)
        sent = tf.cond(
            tf.equal(asked_when_run(topology.rank), root_rank),
            lambda: parts(splits, tf.shape(x, tf.int64)[0], len(members)),
            lambda: tf.cast(came, tf.int64),
        )
        return [placed(home, came, sent, x)]

    shapes = any_rows([x])
    return lambda: differentiable(Op.SCATTER, name, process_set, [x], run, gradient, shapes)[0]


@public(Op.BARRIER)
def barrier(
    process_set: ProcessSet = global_process_set, *, name: str | None = None
) -> Callable[[], Any]:
    """Returns when every member has called it; inside tf.function its node ends then.

    Examples:
        >>> hvd.barrier()
    """
    if tf.executing_eagerly():
        return lambda: ops.barrier(process_set, name=name)
    chosen = next_name(Op.BARRIER, count=True) if name is None else name
    return lambda: barrier_node(lambda: ops.barrier(process_set, name=chosen))
