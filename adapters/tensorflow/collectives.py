# SPDX-License-Identifier: Apache-2.0
"""allreduce, allgather and broadcast of TensorFlow tensors, eagerly and inside tf.function.

The calls are differentiable, take Horovod's arguments, and may be made from any thread. Unnamed
calls are matched by order in eager mode, and by graph.next_name() inside tf.function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from farandole import ops, topology
from farandole.calls.arguments import divisor_of, shown
from farandole.calls.public_call import then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Average, Sum
from farandole.ops.gathers import grouped_allgather_rows
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.forms import any_rows, public, same_shapes, tensors_of
from farandole.tensorflow.graph import Run, differentiable, evaluated_when_run
from farandole.tensorflow.rows import table_like

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
]


def _reduce_op(op: int | None, average: bool | None) -> int:
    """Returns the reduction to use. `average` is Horovod's deprecated argument."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(f"op is {shown(op)} and average is {shown(average)}: pass op alone")
    return Average if average else Sum


def reducing(
    grouped: Run,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    timeout: float | None,
) -> Run:
    """Binds a reduction's arguments. The public call or its graph node calls the result."""
    scaled = {"prescale_factor": factors[0], "postscale_factor": factors[1]}
    return functools.partial(grouped, op=op, process_set=process_set, timeout=timeout, **scaled)


def _divided(factors: tuple[float, float], op: int, process_set: ProcessSet) -> Any:
    """Returns prescale * postscale / divisor as a float64, for sums computed outside the core."""
    divisor = evaluated_when_run(lambda: divisor_of(op, set_id(process_set)))
    return factors[0] * factors[1] / tf.cast(divisor, tf.float64)


def scaled(values: Any, scale: Any) -> Any:
    """Returns scale * values. Integers are never scaled."""
    if values.dtype.is_integer:
        return values
    # A factor may be too small for the short floats.
    dtype = tf.float32 if values.dtype.size < 4 else values.dtype
    return tf.cast(tf.cast(values, dtype) * tf.cast(scale, dtype), values.dtype)


# ---- allreduce


@public(Op.ALLREDUCE)
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[Any]:
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shapes and dtypes must be equal on all ranks. The list is one call (one node inside
    tf.function), which succeeds or fails as a whole. tf.IndexedSlices work with Average and Sum
    only; their result holds the slices of all ranks. Returns new tensors. For Average and Sum,
    gradients are reduced in the same way.

    - tensors: a list of TensorFlow tensors, variables, or values that convert to tensors.
    - device_dense, device_sparse: ignored, but accepted for compatibility with Horovod.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16.
    - op: Average (the default), Sum, Min, Max or Product; `average` is deprecated.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allreduce([tf.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        [<tf.Tensor: shape=(2,), dtype=float32, numpy=array([3., 3.], dtype=float32)>]
    """
    factors = (prescale_factor, postscale_factor)
    return then(_prepared(tensors, average, compression, op, factors, name, process_set, timeout))


@public(Op.ALLREDUCE)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Computes postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Shape and dtype must be equal on all ranks. A tf.IndexedSlices works with Average and Sum only;
    its result holds the slices of all ranks. Returns a new tensor. For Average and Sum, gradients
    are reduced in the same way.

    - tensor: a TensorFlow tensor, a variable, or a value that converts to a tensor.
    - device_dense, device_sparse: ignored, but accepted for compatibility with Horovod.
    - compression: the form in which tensors are sent: Compression.none, fp16 or bf16.
    - op: Average (the default), Sum, Min, Max or Product; `average` is deprecated.
    - prescale_factor, postscale_factor: numbers that multiply inputs and results.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allreduce(tf.ones(2), op=hvd.Sum, prescale_factor=3.0).numpy()
        array([3., 3.], dtype=float32)
    """
    factors = (prescale_factor, postscale_factor)
    meet = _prepared([tensor], average, compression, op, factors, name, process_set, timeout)
    return then(lambda: meet()[0])


def _prepared(
    tensors: Sequence[Any],
    average: bool | None,
    compression: Any,
    op: int | None,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
) -> Callable[[], list[Any]]:
    chosen = _reduce_op(op, average)
    members = list(tensors)
    sparse = [x for x in members if isinstance(x, tf.IndexedSlices)]
    dense = tensors_of(x for x in members if not isinstance(x, tf.IndexedSlices))
    if sparse and chosen not in (Average, Sum):
        raise ValueError(
            "an IndexedSlices can be summed or averaged only: pass tf.convert_to_tensor(x), or set "
            "sparse_as_dense=True"
        )
    scales = chosen == Average or factors[0] * factors[1] != 1.0
    if scales and any(x.dtype.is_integer for x in sparse):
        raise ValueError(
            "an IndexedSlices of integers can be summed only: pass op=Sum and no factors"
        )

    def meet() -> list[Any]:
        sent = [compression.compress(x) for x in dense]
        values = [x for x, _ in sent]
        results = _allreduce(values, chosen, factors, name, process_set, timeout)
        pairs = zip(results, sent, strict=True)
        reduced = iter([compression.decompress(y, context) for y, (_, context) in pairs])
        slices = iter(_allreduce_slices(sparse, chosen, factors, name, process_set, timeout))
        return [next(slices if isinstance(x, tf.IndexedSlices) else reduced) for x in members]

    return meet


def _allreduce(
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
) -> list[Any]:
    run = reducing(ops.grouped_allreduce, op, factors, process_set, timeout)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        if op not in (Average, Sum):
            raise NotImplementedError("allreduce is differentiable for Average and Sum only")
        return _allreduce(gs, op, factors, back, process_set, None)

    shapes = same_shapes(tensors)
    return differentiable(Op.ALLREDUCE, name, process_set, tensors, run, gradient, shapes)


def _allreduce_slices(
    slices: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
) -> list[Any]:
    """Gathers the slices of all ranks. Those who use the result add slices with equal indices."""
    if not slices:
        return []
    parts = [part for x in slices for part in (x.values, x.indices)]
    named = None if name is None else f"{name}.slices"
    rows_of_all, _ = gathered(parts, named, process_set, timeout)
    scale = _divided(factors, op, process_set)
    rows = zip(rows_of_all[::2], rows_of_all[1::2], slices, strict=True)
    return [tf.IndexedSlices(scaled(v, scale), i, x.dense_shape) for v, i, x in rows]


# ---- allgather


@public(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[Any]:
    """Concatenates all ranks' tensors along the first dimension, in rank order.

    Tensors need at least one dimension. Only the first dimension may differ between ranks. Dtypes
    must be equal on all ranks. Returns new tensors. As in Horovod, a tensor's gradient consists of
    this rank's rows of the gradients, averaged over the ranks.

    - tensors: a list of TensorFlow tensors, variables, or values that convert to tensors.
    - name, process_set: calls match by name, else by order, within this set.
    - ignore_name_scope: ignored, but accepted for compatibility with Horovod.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.grouped_allgather([tf.range(3)])
        [<tf.Tensor: shape=(3,), dtype=int32, numpy=array([0, 1, 2], dtype=int32)>]
    """
    xs = tensors_of(tensors)
    return then(lambda: gathered(xs, name, process_set, timeout)[0])


@public(Op.ALLGATHER)
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Concatenates all ranks' tensors along the first dimension, in rank order.

    Tensors need at least one dimension. Only the first dimension may differ between ranks. The
    dtype must be equal on all ranks. Returns a new tensor. As in Horovod, its gradient consists of
    this rank's rows of the gradients, averaged over the ranks.

    - tensor: a TensorFlow tensor, a variable, or a value that converts to a tensor.
    - name, process_set: calls match by name, else by order, within this set.
    - ignore_name_scope: ignored, but accepted for compatibility with Horovod.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather(tf.range(3)).numpy()
        array([0, 1, 2], dtype=int32)
    """
    (x,) = tensors_of([tensor])
    return then(lambda: gathered([x], name, process_set, timeout)[0][0])


def gathered(
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None = None,
) -> tuple[list[Any], list[Any]]:
    """Returns the gathered tensors and, for each, an int64 tensor of every member's row count."""
    count = len(tensors)
    outputs: list[Any] = []

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        common: Any = {"name": name, "process_set": process_set, "timeout": timeout}
        pairs = grouped_allgather_rows(xs, **common).wait()
        return [x for x, _ in pairs] + [table_like(x, rows) for x, rows in pairs]

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        means = _allreduce(gs[:count], Average, (1.0, 1.0), back, process_set, None)
        own = evaluated_when_run(process_set.rank)
        found = []
        for mean, rows in zip(means, outputs[count:], strict=True):
            start = tf.reduce_sum(rows[:own])
            found.append(mean[start : start + rows[own]])
        return found

    shapes = [*any_rows(tensors), *[(None,)] * count]
    types = [*(x.dtype for x in tensors), *[tf.int64] * count]
    outputs[:] = differentiable(
        Op.ALLGATHER, name, process_set, tensors, run, gradient, shapes, types
    )
    return outputs[:count], outputs[count:]


# ---- broadcast


@public(Op.BROADCAST)
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Sends the tensor of `root_rank` to every rank. Shape and dtype must be equal on all ranks.

    Returns a new tensor. As in Horovod, its gradient is the average of all ranks' gradients on the
    root, and zeros on other ranks.

    - tensor: a TensorFlow tensor, a variable, or a value that converts to a tensor.
    - root_rank: the sender's rank in the world; it must be a member of the process set.
    - name, process_set: calls match by name, else by order, within this set.
    - ignore_name_scope: ignored, but accepted for compatibility with Horovod.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast(tf.range(3), root_rank=0).numpy()
        array([0, 1, 2], dtype=int32)
    """
    xs = tensors_of([tensor])
    return then(lambda: _broadcast(xs, root_rank, name, process_set, timeout)[0])


def _broadcast(
    tensors: Sequence[Any],
    root: int,
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None = None,
) -> list[Any]:
    common: Any = {"root_rank": root, "process_set": process_set, "timeout": timeout}

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        return ops.broadcast_list(xs, name=name, **common).wait()

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        found = _allreduce(gs, Average, (1.0, 1.0), back, process_set, None)
        here = tf.equal(evaluated_when_run(topology.rank), root)
        return [tf.where(here, x, tf.zeros_like(x)) for x in found]

    shapes = same_shapes(tensors)
    return differentiable(Op.BROADCAST, name, process_set, tensors, run, gradient, shapes)


@public(Op.BROADCAST)
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> None:
    """Assigns the values of `root_rank` to TensorFlow or Keras variables. This is a collective.

    The whole list is sent as one call, so the number, order, shapes and dtypes of the variables
    must be equal on all ranks. Inside tf.function, this happens when the function runs.

    - variables: a list of TensorFlow or Keras variables.
    - root_rank: the sender's rank in the world; it must be a member of the process set.
    - inplace: ignored, but accepted for compatibility with Horovod.
    - name, process_set: calls match by name, else by order, within this set.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> weight = tf.Variable([1.0, 2.0])
        >>> hvd.broadcast_variables([weight], root_rank=0)
    """
    targets = list(variables)
    for i, variable in enumerate(targets):
        if not hasattr(variable, "assign"):
            raise TypeError(f"variables[{i}] is a {type(variable).__name__}, not a variable")
    values = tensors_of(targets)
    if name is None and tf.executing_eagerly():
        name = "broadcast_variables"

    def meet() -> None:
        results = _broadcast(values, root_rank, name, process_set, timeout) if values else []
        for variable, value in zip(targets, results, strict=True):
            variable.assign(value)

    return then(meet)
