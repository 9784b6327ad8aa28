# SPDX-License-Identifier: Apache-2.0
"""The neutral collectives, public calls for any thread: arrays of any kind in, arrays of the same
kind out.

Each is written once, as `grouped_x_async` over a list; `x_async` takes one array, `x` and
`grouped_x` wait, a trailing underscore means in place. Common arguments: `name` matches calls
across ranks (unnamed calls match by their order); `process_set`: the ranks that take part;
`timeout` (seconds): longer waits raise StallError. Common errors: MismatchError if ranks disagree,
PeerError if one died or left, ShutdownError before init() or after shutdown(), ValueError and
TypeError for wrong arguments: the peers of such a call fail too instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

from farandole import topology
from farandole.arrays.buffers import Buffer, check_apart
from farandole.arrays.kinds import Kind, kind_of
from farandole.calls import documents
from farandole.calls.arguments import ReduceOp as ReduceOp
from farandole.calls.forms import blocking, blocking_of_any, single_of_any
from farandole.calls.gpu_handle import GpuHandle
from farandole.calls.handles import Handle, take, value_of
from farandole.calls.prepared import RepeatedCall
from farandole.calls.public_call import collective, collective_then
from farandole.calls.requests import NOTHING, Call, Op, note_join, refuse_all, submit
from farandole.calls.rows import Table, splits_of
from farandole.members import ProcessSet, global_process_set, set_id

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reduce",
    "grouped_reduce_",
    "grouped_reduce_async",
    "grouped_reduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "reduce",
    "reduce_",
    "reduce_async",
    "reduce_async_",
    "reducescatter",
    "reducescatter_async",
    "scatter",
    "scatter_async",
]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Rows = np.ndarray[Any, np.dtype[np.int64]]


Average, Sum, Adasum, Min, Max, Product = ReduceOp


def _start(
    call: Call, tensors: Sequence[T], timeout: float | None, in_place: bool = False
) -> Handle[list[T]]:
    """Submits `call`, one of MIRRORED, over `tensors`: in place or into new arrays. A reduction to
    another rank gives the tensors back."""
    tensors = list(tensors)
    if not tensors:
        return Handle(submit(call, [], own=3), lambda _: [], call, timeout)
    kinds, inputs = describe(tensors, in_place)
    results, outputs = tensors, inputs
    if in_place and call.op is not Op.BROADCAST:
        check_apart(inputs)
    here = not topology.is_initialized() or call.root == topology.rank()
    same = in_place or (call.op is Op.REDUCE and not here)
    if not same:
        results, outputs = new_results(kinds, tensors, inputs)

    def collect(_: Any) -> list[T]:
        return results if same else sealed(kinds, results, tensors)

    handle = _handle(submit(call, inputs, outputs, own=3), inputs, tensors, collect, call, timeout)
    if len(tensors) == 1 and (same or kinds[0].gives_itself()):
        handle.prepared = RepeatedCall(call, tensors[0], inputs[0], same, timeout)
    return handle


def _start_rows(
    call: Call, tensors: Sequence[T], timeout: float | None
) -> Handle[list[tuple[T, Table]]]:
    """Submits `call`, whose results have a shape that only negotiation tells. Gives each result
    with the rows received from each member of the set, which are 0 from one that has joined."""
    tensors = list(tensors)
    kinds, inputs = describe(tensors, in_place=False)

    def collect(numbers: Any) -> list[tuple[T, Table]]:
        found = []
        for kind, number, buffer, x in zip(kinds, numbers, inputs, tensors, strict=True):
            memory, rows = take(number, buffer, kind.stream(x))
            found.append((kind.wrap(memory, x), rows))
        return found

    numbers = submit(call, inputs, own=3)
    return _handle(numbers, inputs, tensors, collect if tensors else lambda _: [], call, timeout)


def new_results(
    kinds: Sequence[Kind], tensors: Sequence[Any], inputs: Sequence[Buffer]
) -> tuple[list[Any], list[Buffer]]:
    """New arrays for results of the inputs' form, to be passed to sealed(); their memory."""
    triples = zip(kinds, tensors, inputs, strict=True)
    results = [kind.empty(x, buffer.shape) for kind, x, buffer in triples]
    return results, [k.describe(y, True) for k, y in zip(kinds, results, strict=True)]


def sealed(kinds: Sequence[Kind], results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """The user's arrays for new_results() that are complete."""
    return [k.sealed(y, x) for k, y, x in zip(kinds, results, tensors, strict=True)]


def describe(tensors: Sequence[Any], in_place: bool) -> tuple[list[Kind], list[Buffer]]:
    """The kinds and memory of arrays. Raises TypeError or ValueError that names a wrong one."""
    kinds: list[Kind] = []
    inputs: list[Buffer] = []
    try:
        for x in tensors:
            kinds.append(kind_of(x))
            inputs.append(kinds[-1].describe(x, in_place))
    except (TypeError, ValueError) as reason:
        what = "tensor" if len(tensors) == 1 else f"tensors[{len(inputs)}]"
        raise type(reason)(f"{what}: {reason}") from reason
    return kinds, inputs


def _handle(
    numbers: Any,
    inputs: Sequence[Buffer],
    tensors: Sequence[Any],
    collect: Callable[[Any], R],
    what: object,
    timeout: float | None,
) -> Handle[R]:
    """A handle for arrays in this kind of memory, CPU or GPU."""
    for buffer, x in zip(inputs, tensors, strict=True):
        if buffer.device >= 0:
            stream = functools.partial(kind_of(x).stream, x)
            return GpuHandle(numbers, collect, what, timeout, stream)
    return Handle(numbers, collect, what, timeout)


def _reduction(
    op: Op,
    reduce_op: int | None,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
    root: int = -1,
) -> Call:
    reduce_op = Average if reduce_op is None else ReduceOp(reduce_op)
    if op is not Op.ALLREDUCE and reduce_op is Adasum:
        raise (NotImplementedError if op is Op.REDUCESCATTER else ValueError)(
            "op is Adasum, which is defined for allreduce only: pass Sum or Average, or allreduce "
            "with op=Adasum and keep the part you need"
        )
    factors = (float(prescale), float(postscale))
    return Call(op, name, set_id(process_set), reduce_op, *factors, index(root))


def _allreduce(
    tensors: Sequence[T],
    op: int | None,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
    in_place: bool = False,
) -> Handle[list[T]]:
    if op == Adasum:
        from farandole.adasum import adasum_async  # imported late: it uses this module

        return adasum_async(tensors, in_place, name, factors, process_set, timeout)
    call = _reduction(Op.ALLREDUCE, op, *factors, name, process_set)
    return _start(call, tensors, timeout, in_place)


@collective(Op.ALLREDUCE)
def grouped_allreduce_async(
    tensors: Sequence[T],
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """postscale_factor * op(prescale_factor * x) over the ranks, by default the average.

    Any shape, equal on all ranks as the dtype is. A list is reduced together, all of it or nothing.
    Returns a handle, whose wait() gives new arrays of the same kind, shape and dtype.

    Examples:
        >>> hvd.grouped_allreduce_async([np.ones(2)], op=hvd.Sum, prescale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _allreduce(tensors, op, factors, name, process_set, timeout)


@collective(Op.ALLREDUCE)
def grouped_allreduce_async_(
    tensors: Sequence[T],
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Arrays become postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch them until
    the call is done. Returns a handle, whose wait() gives these very arrays.

    Examples:
        >>> hvd.grouped_allreduce_async_([np.ones(2)], op=hvd.Sum, postscale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    return _allreduce(tensors, op, factors, name, process_set, timeout, in_place=True)


@collective(Op.BROADCAST)
def grouped_broadcast_async(
    tensors: Sequence[T],
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """The values of `root_rank`. Any shape and dtype, equal on all ranks.

    Returns a handle, whose wait() gives new arrays of the same kind.

    Examples:
        >>> hvd.grouped_broadcast_async([np.arange(3)], root_rank=0).wait()
        [array([0, 1, 2])]
    """
    call = Call(Op.BROADCAST, name, set_id(process_set), root=index(root_rank))
    return _start(call, tensors, timeout)


@collective(Op.BROADCAST)
def grouped_broadcast_async_(
    tensors: Sequence[T],
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Arrays get the values of `root_rank`, in place.

    Contiguous and writable, of equal shape and dtype on all ranks; nobody else may touch them until
    the call is done. Returns a handle, whose wait() gives these very arrays.

    Examples:
        >>> hvd.grouped_broadcast_async_([np.arange(3)], root_rank=0).wait()
        [array([0, 1, 2])]
    """
    call = Call(Op.BROADCAST, name, set_id(process_set), root=index(root_rank))
    return _start(call, tensors, timeout, in_place=True)


@collective(Op.ALLGATHER)
def grouped_allgather_async(
    tensors: Sequence[T],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """All ranks' arrays, concatenated along the first dimension in rank order.

    At least one dimension; only the first may differ between ranks. Any dtype, equal on all ranks.
    Returns a handle, whose wait() gives new arrays of the same kind.

    Examples:
        >>> hvd.grouped_allgather_async([np.arange(3)]).wait()
        [array([0, 1, 2])]
    """
    call = Call(Op.ALLGATHER, name, set_id(process_set))
    return _start_rows(call, tensors, timeout).map(lambda pairs: [x for x, _ in pairs])


@collective(Op.ALLGATHER)
def _grouped_allgather_async(
    tensors: Sequence[T],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[tuple[T, Table]]]:
    """The same, each array with the rows from each member; for adapters."""
    return _start_rows(Call(Op.ALLGATHER, name, set_id(process_set)), tensors, timeout)


@collective(Op.REDUCESCATTER)
def grouped_reducescatter_async(
    tensors: Sequence[T],
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """This rank's rows of postscale_factor * op(prescale_factor * x), by default of the average.

    At least one dimension, any shape and dtype, equal on all ranks. If rows do not divide evenly,
    low ranks get one more. Any op but Adasum. Returns a handle, whose wait() gives new arrays of
    the same kind.

    Examples:
        >>> hvd.grouped_reducescatter_async([np.arange(3)], op=hvd.Sum).wait()
        [array([0, 1, 2])]
    """
    call = _reduction(Op.REDUCESCATTER, op, prescale_factor, postscale_factor, name, process_set)
    return _start_rows(call, tensors, timeout).map(lambda pairs: [x for x, _ in pairs])


@collective(Op.REDUCE)
def grouped_reduce_async(
    tensors: Sequence[T],
    root_rank: int,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """postscale_factor * op(prescale_factor * x) on `root_rank` alone, by default the average.

    Any shape, equal on all ranks as the dtype is. Any op but Adasum. A list is reduced together,
    all of it or nothing. Returns a handle, whose wait() gives new arrays of the same kind on the
    root, and elsewhere the arrays that were given, as they are.

    Examples:
        >>> hvd.grouped_reduce_async([np.ones(2)], root_rank=0, op=hvd.Sum).wait()
        [array([1., 1.])]
    """
    factors = (prescale_factor, postscale_factor)
    call = _reduction(Op.REDUCE, op, *factors, name, process_set, root_rank)
    return _start(call, tensors, timeout)


@collective(Op.REDUCE)
def grouped_reduce_async_(
    tensors: Sequence[T],
    root_rank: int,
    *,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """The root's arrays become postscale_factor * op(prescale_factor * x) over the ranks, in place.

    Those of other ranks stay as they are. Contiguous and writable, of equal shape and dtype on all
    ranks; nobody else may touch them until the call is done. Any op but Adasum. Returns a handle,
    whose wait() gives these very arrays.

    Examples:
        >>> hvd.grouped_reduce_async_([np.ones(2)], root_rank=0, postscale_factor=3.0).wait()
        [array([3., 3.])]
    """
    factors = (prescale_factor, postscale_factor)
    call = _reduction(Op.REDUCE, op, *factors, name, process_set, root_rank)
    return _start(call, tensors, timeout, in_place=True)


allreduce_async = single_of_any(grouped_allreduce_async)
allreduce_async_ = single_of_any(grouped_allreduce_async_)
broadcast_async = single_of_any(grouped_broadcast_async)
broadcast_async_ = single_of_any(grouped_broadcast_async_)
allgather_async = single_of_any(grouped_allgather_async)
reducescatter_async = single_of_any(grouped_reducescatter_async)
reduce_async = single_of_any(grouped_reduce_async)
reduce_async_ = single_of_any(grouped_reduce_async_)

allreduce = blocking_of_any(allreduce_async)
allreduce_ = blocking_of_any(allreduce_async_)
broadcast = blocking_of_any(broadcast_async)
broadcast_ = blocking_of_any(broadcast_async_)
allgather = blocking_of_any(allgather_async)
reducescatter = blocking_of_any(reducescatter_async)
reduce = blocking_of_any(reduce_async)
reduce_ = blocking_of_any(reduce_async_)

grouped_allreduce = blocking(grouped_allreduce_async)
grouped_allreduce_ = blocking(grouped_allreduce_async_)
grouped_broadcast = blocking(grouped_broadcast_async)
grouped_broadcast_ = blocking(grouped_broadcast_async_)
grouped_allgather = blocking(grouped_allgather_async)
grouped_reducescatter = blocking(grouped_reducescatter_async)
grouped_reduce = blocking(grouped_reduce_async)
grouped_reduce_ = blocking(grouped_reduce_async_)


@collective(Op.BARRIER)
def _barrier_async(
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> Handle[None]:
    """Returns when every member has called it or has joined. With a `name` any thread may call it.

    Examples:
        >>> hvd.barrier()
    """
    call = Call(Op.BARRIER, name, set_id(process_set))
    return Handle(submit(call, [NOTHING], own=2), lambda _: None, call, timeout)


barrier = blocking(_barrier_async)
barrier.__name__ = barrier.__qualname__ = "barrier"


# ---- rows by splits


@collective(Op.ALLTOALL)
def alltoall_async(
    tensor: T,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[tuple[T, Rows]]:
    """Sends `splits[i]` rows of the array to member i, and receives theirs in rank order.

    Rows for a member that has joined are dropped. At least one dimension; dtype and all dimensions
    but the first are equal on all ranks. Returns a handle, whose wait() gives (a new array of the
    same kind, the rows from each member as int64); alltoall() gives the array alone if it has no
    `splits`.

    Examples:
        >>> hvd.alltoall_async(np.arange(3), splits=[3]).wait()
        (array([0, 1, 2]), array([3]))
    """
    call = Call(Op.ALLTOALL, name, set_id(process_set), splits=splits_of(splits))
    return _start_rows(call, [tensor], timeout).map(
        lambda pairs: (pairs[0][0], np.array(pairs[0][1], np.int64))
    )


@collective(Op.SCATTER)
def scatter_async(
    tensor: T,
    root_rank: int = 0,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Handle[T]:
    """This rank's rows of the array of `root_rank`, a rank of the world: a new array.

    Member i gets `splits[i]` rows, in member order; only the root's splits count. On the other
    ranks `tensor` tells what to receive: kind of array, device, dtype and all dimensions but the
    first. It may have no rows, as numpy.empty((0, 3), "float32"). Returns a handle, whose wait()
    gives a new array of the same kind.

    Examples:
        >>> hvd.scatter_async(np.arange(3), root_rank=0, splits=[3]).wait()
        array([0, 1, 2])
    """
    call = Call(
        Op.SCATTER, name, set_id(process_set), root=index(root_rank), splits=splits_of(splits)
    )
    return _start_rows(call, [tensor], timeout).map(lambda pairs: pairs[0][0])


@overload
def alltoall(
    tensor: T,
    splits: None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> T: ...
@overload
def alltoall(
    tensor: T,
    splits: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> tuple[T, Rows]: ...
def alltoall(*args: Any, **kwargs: Any) -> Any:
    """The waiting form of alltoall_async(), whose documentation it gets."""
    output, received = alltoall_async(*args, **kwargs).wait()
    splits = args[1] if len(args) > 1 else kwargs.get("splits")
    return output if splits is None else (output, received)


alltoall.__doc__ = documents.of_waiting(alltoall_async.__doc__ or "")
alltoall.__wrapped__ = alltoall_async  # type: ignore[attr-defined]  # whose signature it has

scatter = blocking(scatter_async)


# ---- join


def _start_join(call: Call, timeout: float | None) -> Handle[int]:
    numbers = submit(call, [NOTHING], own=1)
    note_join(call.process_set)
    return Handle(numbers, lambda done: value_of(done[0]), call, timeout)


def _join_in_vain(calls: list[Call], reason: Exception) -> None:
    """Joins with an error, so that the other ranks get the error of this rank's join().

    Not if several sets are possible: in the wrong one this rank would wait forever.
    """
    if len(calls) == 1:
        refuse_all(calls, reason)
        with contextlib.suppress(Exception):  # `reason` itself is the error to raise
            _start_join(calls[0], None).wait()


@collective_then(Op.JOIN, tell=_join_in_vain)
def join(
    device: int = -1,
    *,
    process_set: ProcessSet = global_process_set,
    timeout: float | None = None,
) -> Callable[[], int]:
    """Waits, out of data, until all members have joined; returns the last one's rank.

    Meanwhile this rank contributes the identity to the others' reductions: zeros to sums, ones to
    products. An average still divides by all members. This rank brings no rows to gathers and
    exchanges; rows that others send to it are dropped, and their gradients are zeros. Calls that
    need this rank, as their root or as a member of a new process set, are errors on the ranks that
    make them. A wrong argument on one rank is an error on all members, once all have joined.

    Examples:
        >>> hvd.join()
        0
    """
    return _start_join(Call(Op.JOIN, process_set=set_id(process_set)), timeout).wait
