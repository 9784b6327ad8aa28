# SPDX-License-Identifier: Apache-2.0
"""allreduce, allgather, broadcast and reducescatter on TensorFlow's tensors, in eager mode and
inside tf.function: public calls, with Horovod's arguments, differentiable, for any thread.

An unnamed call meets by its order in eager mode, and by the name of graph.next_name() inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from farandole import ops, topology
from farandole.calls.arguments import divisor_of, shown
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops import Average, Sum
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.forms import any_rows, one, public, same_shapes, tensors_of
from farandole.tensorflow.graph import Run, asked_when_run, differentiable
from farandole.tensorflow.rows import kept, placed, table_like

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reduce",
    "grouped_reducescatter",
    "reduce",
    "reducescatter",
]


def _reduce_op(op: int | None, average: bool | None) -> int:
    """The reduction of a call; `average` is Horovod's deprecated argument for it."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(f"op is {shown(op)} and average is {shown(average)}: pass op alone")
    return Average if average else Sum


def _reducing(grouped: Run, op: int, factors: tuple[float, float], process_set: ProcessSet) -> Run:
    """The reduction that a call or its node makes."""
    scaled = {"prescale_factor": factors[0], "postscale_factor": factors[1]}
    return functools.partial(grouped, op=op, process_set=process_set, **scaled)


def _divided(factors: tuple[float, float], op: int, process_set: ProcessSet) -> Any:
    """The factor of a reduction that is made without the core: a float64 scalar."""
    divisor = asked_when_run(lambda: divisor_of(op, set_id(process_set)))
    return factors[0] * factors[1] / tf.cast(divisor, tf.float64)


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
) -> Callable[[], list[Any]]:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing,
    inside tf.function by one node. tf.IndexedSlices, with Average and Sum, are gathered: their
    results have the slices of all ranks. Returns new tensors; gradients, of Average and Sum, are
    reduced as the tensors were.

    Examples:
        >>> hvd.grouped_allreduce([tf.ones(2)], op=hvd.Sum, prescale_factor=3.0)
        [<tf.Tensor: shape=(2,), dtype=float32, numpy=array([3., 3.], dtype=float32)>]
    """
    chosen, factors = _reduce_op(op, average), (prescale_factor, postscale_factor)
    members = list(tensors)
    sparse = [x for x in members if isinstance(x, tf.IndexedSlices)]
    dense = tensors_of(x for x in members if not isinstance(x, tf.IndexedSlices))
    if sparse and chosen not in (Average, Sum):
        raise ValueError(
            "an IndexedSlices can be summed or averaged only: pass tf.convert_to_tensor() of it, "
            "or sparse_as_dense=True"
        )
    if any(not x.dtype.is_floating and chosen == Average for x in sparse):
        raise ValueError("an IndexedSlices of integers can be summed only: pass op=Sum")

    def meet() -> list[Any]:
        sent = [compression.compress(x) for x in dense]
        results = _allreduce([x for x, _ in sent], chosen, factors, name, process_set)
        pairs = zip(results, sent, strict=True)
        reduced = iter([compression.decompress(y, context) for y, (_, context) in pairs])
        slices = iter(_allreduce_slices(sparse, chosen, factors, name, process_set))
        return [next(slices if isinstance(x, tf.IndexedSlices) else reduced) for x in members]

    return meet


allreduce = one(grouped_allreduce)


def _allreduce(
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    run = _reducing(ops.grouped_allreduce, op, factors, process_set)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        if op not in (Average, Sum):
            raise NotImplementedError("allreduce has a gradient for Average and Sum only")
        return _allreduce(gs, op, factors, back, process_set)

    shapes = same_shapes(tensors)
    return differentiable(Op.ALLREDUCE, name, process_set, tensors, run, gradient, shapes)


def _allreduce_slices(
    slices: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Slices of all ranks; who uses the result adds those of one index."""
    if not slices:
        return []
    parts = [part for x in slices for part in (x.values, x.indices)]
    gathered, _ = _allgather(parts, None if name is None else f"{name}.slices", process_set)
    scale = _divided(factors, op, process_set)
    rows = zip(gathered[::2], gathered[1::2], slices, strict=True)
    return [tf.IndexedSlices(v * tf.cast(scale, v.dtype), i, x.dense_shape) for v, i, x in rows]


# ---- allgather


@public(Op.ALLGATHER)
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], list[Any]]:
    """All ranks' tensors, concatenated along the first dimension in rank order.

    At least one dimension; only the first may differ between ranks. Any dtype, equal on all ranks.
    Returns new tensors. Their gradient is as in Horovod: this rank's rows of the gradients' average
    over the ranks.

    Examples:
        >>> hvd.grouped_allgather([tf.range(3)])
        [<tf.Tensor: shape=(3,), dtype=int32, numpy=array([0, 1, 2], dtype=int32)>]
    """
    xs = tensors_of(tensors)
    return lambda: _allgather(xs, name, process_set)[0]


allgather = one(grouped_allgather)


def _allgather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet
) -> tuple[list[Any], list[Any]]:
    """The results, and the rows of each by member: int64."""
    count = len(tensors)
    outputs: list[Any] = []

    def run(xs: Sequence[Any], name: str | None) -> list[Any]:
        handle = ops._grouped_allgather_async(xs, name=name, process_set=process_set)
        pairs = handle.wait()
        return [x for x, _ in pairs] + [table_like(x, rows) for x, rows in pairs]

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        means = _allreduce(gs[:count], Average, (1.0, 1.0), back, process_set)
        own = asked_when_run(process_set.rank)
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
) -> Callable[[], Any]:
    """The tensor of `root_rank`. Any shape and dtype, equal on all ranks.

    Returns a new tensor. Its gradient is as in Horovod: on the root the gradients' average over the
    ranks, else zeros.

    Examples:
        >>> hvd.broadcast(tf.range(3), root_rank=0).numpy()
        array([0, 1, 2], dtype=int32)
    """
    xs = tensors_of([tensor])
    return lambda: _broadcast(xs, root_rank, name, process_set)[0]


def _broadcast(
    tensors: Sequence[Any],
    root: int,
    name: str | None,
    process_set: ProcessSet,
    back_op: int = Average,
) -> list[Any]:
    """`back_op`: of the gradients."""
    run = functools.partial(ops.grouped_broadcast, root_rank=root, process_set=process_set)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        found = _allreduce(gs, back_op, (1.0, 1.0), back, process_set)
        here = tf.equal(asked_when_run(topology.rank), root)
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
) -> Callable[[], None]:
    """Assigns the values of `root_rank` to variables of TensorFlow or Keras; collective.

    All together, in the order of the list: counts, shapes and dtypes are equal on all ranks. Inside
    tf.function it happens when the function runs.

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
        results = _broadcast(values, root_rank, name, process_set) if values else []
        for variable, value in zip(targets, results, strict=True):
            variable.assign(value)

    return meet


# ---- reduce


@public(Op.REDUCE)
def grouped_reduce(
    tensors: Sequence[Any],
    root_rank: int,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], list[Any]]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. Any op but Adasum. A list is reduced together,
    all of it or nothing. Returns new tensors on the root, and elsewhere the values that were given.
    The gradient, of Average and Sum, is on all ranks that of the root's result; what the others
    make of theirs has none.

    Examples:
        >>> hvd.grouped_reduce([tf.ones(2)], root_rank=0, op=hvd.Sum, prescale_factor=3.0)
        [<tf.Tensor: shape=(2,), dtype=float32, numpy=array([3., 3.], dtype=float32)>]
    """
    xs, factors, chosen = (
        tensors_of(tensors),
        (prescale_factor, postscale_factor),
        _reduce_op(op, None),
    )
    grouped = functools.partial(ops.grouped_reduce, root_rank=root_rank)
    run = _reducing(grouped, chosen, factors, process_set)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        if chosen not in (Average, Sum):
            raise NotImplementedError("reduce has a gradient for Average and Sum only")
        scale = _divided(factors, chosen, process_set)
        found = _broadcast(gs, root_rank, back, process_set, back_op=Sum)
        return [g * tf.cast(scale, g.dtype) for g in found]

    shapes = same_shapes(xs)
    return lambda: differentiable(Op.REDUCE, name, process_set, xs, run, gradient, shapes)


reduce = one(grouped_reduce)


# ---- reducescatter


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
) -> Callable[[], list[Any]]:
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more. Any op but Adasum. Returns new tensors; the gradient, of Average and
    Sum, is as in Horovod: all ranks' gradients concatenated, times the number of ranks for Sum.

    Examples:
        >>> hvd.grouped_reducescatter([tf.range(3)], op=hvd.Sum)
        [<tf.Tensor: shape=(3,), dtype=int32, numpy=array([0, 1, 2], dtype=int32)>]
    """
    xs, factors = tensors_of(tensors), (prescale_factor, postscale_factor)
    return lambda: _reducescatter(xs, compression, op, factors, name, process_set)


reducescatter = one(grouped_reducescatter)


def _reducescatter(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    sent = [compression.compress(x) for x in tensors]
    encoded = [x for x, _ in sent]
    run = _reducing(ops.grouped_reducescatter, op, factors, process_set)

    def gradient(gs: Sequence[Any], back: str) -> list[Any]:
        if op not in (Average, Sum):
            raise NotImplementedError("reducescatter has a gradient for Average and Sum only")
        members = asked_when_run(process_set.size)
        scale = factors[0] * factors[1] * tf.cast(members if op == Sum else 1, tf.float64)
        found = []
        for rows, came, x in zip(*_allgather(gs, back, process_set), encoded, strict=True):
            home = placed(rows, came, kept(tf.shape(x, tf.int64)[0], members), x)
            found.append(home * tf.cast(scale, home.dtype))
        return found

    shapes = any_rows(tensors)
    results = differentiable(Op.REDUCESCATTER, name, process_set, encoded, run, gradient, shapes)
    pairs = zip(results, sent, strict=True)
    return [compression.decompress(y, context) for y, (_, context) in pairs]
