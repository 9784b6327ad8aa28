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

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Concatenate, ParamSpec, TypeVar

from farandole.arrays.buffers import Buffer, check_apart
from farandole.arrays.kinds import Kind, kind_of
from farandole.calls import documents, repeats
from farandole.calls.arguments import ReduceOp as ReduceOp
from farandole.calls.gpu_handle import GpuHandle
from farandole.calls.handles import Handle, take
from farandole.calls.public_call import collective
from farandole.calls.repeats import Repeat
from farandole.calls.requests import MIRRORED, NOTHING, Call, Op, submit
from farandole.members import ProcessSet, global_process_set, set_id

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


Average, Sum, Adasum, Min, Max, Product = ReduceOp
_again = repeats.again
_MISSING: Any = object()  # stands for a tensor that the caller left out, or passed by name


def _start(
    call: Call, tensors: Sequence[T], timeout: float | None, in_place: bool = False
) -> Handle[list[T]]:
    """Submits `call` over `tensors`: in place, into new arrays, or, if only negotiation tells the
    results' shapes, into memory that the core allocates."""
    tensors = list(tensors)
    if not tensors:
        return Handle(submit(call, []), lambda _: [], call, timeout)
    kinds, inputs = describe(tensors, in_place)
    results, outputs = tensors, inputs
    if in_place and call.op is Op.ALLREDUCE:
        check_apart(inputs)
    if not in_place and call.op in MIRRORED:
        results, outputs = new_results(kinds, tensors, inputs)
    elif not in_place:
        outputs = [NOTHING] * len(inputs)

    def collect(numbers: Any) -> list[T]:
        if in_place:
            return results
        if call.op in MIRRORED:
            return sealed(kinds, results, tensors)
        rows = zip(kinds, numbers, inputs, tensors, strict=True)
        return [k.wrap(take(n, b, k.stream(x))[0], x) for k, n, b, x in rows]

    handle = _handle(submit(call, inputs, outputs), inputs, tensors, collect, call, timeout)
    if len(tensors) == 1 and call.op in MIRRORED and (in_place or kinds[0].gives_itself()):
        handle.repeat = Repeat(call, tensors[0], inputs[0], in_place, timeout)
    return handle


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


def _single(
    start: Callable[Concatenate[Sequence[T], P], Handle[list[T]]],
) -> Callable[Concatenate[T, P], Handle[T]]:
    """Makes the form for one array of a `grouped_` function."""

    def call(tensor: T = _MISSING, /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        again = _again(start, tensor, args, kwargs)
        if again is not None:
            return again
        if tensor is _MISSING:
            return by_name(args, kwargs)
        handle = start([tensor], *args, **kwargs)
        if handle.repeat is not None:
            repeats.remember(start, tensor, args, kwargs, handle.repeat)
        return handle.map(lambda results: results[0])

    def by_name(args: Any, kwargs: Any) -> Handle[T]:
        if "tensor" in kwargs:
            return call(kwargs.pop("tensor"), *args, **kwargs)
        given: Callable[..., Handle[T]] = start  # type: ignore[assignment]
        return given(*args, **kwargs)  # raises the error about it

    _document(call, start, "grouped_", "tensor")
    return call


def _one_of(grouped: Callable[Concatenate[Sequence[T], P], list[R]]) -> Callable[..., R]:
    """As `_single`, of a `grouped_` function that waits."""

    def call(tensor: T = _MISSING, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if tensor is _MISSING and "tensor" in kwargs:
            tensor = kwargs.pop("tensor")  # type: ignore[assignment]
        if tensor is _MISSING:
            return grouped(*args, **kwargs)[0]  # type: ignore[arg-type]  # says that it is missing
        (result,) = grouped([tensor], *args, **kwargs)
        return result

    _document(call, grouped, "grouped_", "tensor")
    return call


def _blocking(start: Callable[P, Handle[R]]) -> Callable[P, R]:
    """Makes the waiting form of an `_async` function."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return start(*args, **kwargs).wait()

    _document(call, start, "_async")
    return call


def _document(call: Any, start: Any, less: str, first: str | None = None) -> None:
    """Documents `call` as `start`, its name without `less`, its first argument named `first`."""
    functools.update_wrapper(call, start)
    change = documents.of_waiting if first is None else documents.of_one
    call.__doc__ = change(start.__doc__ or "")
    call.__name__ = call.__qualname__ = start.__name__.replace(less, "")
    arguments = list(inspect.signature(start).parameters.values())
    if first is not None:
        only = inspect.Parameter.POSITIONAL_ONLY
        arguments[0] = arguments[0].replace(name=first, annotation=Any, kind=only)
    call.__signature__ = inspect.Signature(arguments)


def _reduction(
    op: Op,
    reduce_op: int | None,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
) -> Call:
    reduce_op = Average if reduce_op is None else ReduceOp(reduce_op)
    if op is Op.REDUCESCATTER and reduce_op is Adasum:
        raise ValueError(
            "op is Adasum, which is defined for allreduce only: pass Sum or Average, or allreduce "
            "with op=Adasum and take your rows of it"
        )
    return Call(op, name, set_id(process_set), reduce_op, float(prescale), float(postscale))


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
    return _start(Call(Op.ALLGATHER, name, set_id(process_set)), tensors, timeout)


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

    At least one dimension, any shape and dtype, equal on all ranks. Where rows do not divide
    evenly, low ranks get one more. Any op but Adasum. Returns a handle, whose wait() gives new
    arrays of the same kind.

    Examples:
        >>> hvd.grouped_reducescatter_async([np.arange(3)], op=hvd.Sum).wait()
        [array([0, 1, 2])]
    """
    call = _reduction(Op.REDUCESCATTER, op, prescale_factor, postscale_factor, name, process_set)
    return _start(call, tensors, timeout)


allreduce_async = _single(grouped_allreduce_async)
allreduce_async_ = _single(grouped_allreduce_async_)
broadcast_async = _single(grouped_broadcast_async)
broadcast_async_ = _single(grouped_broadcast_async_)
allgather_async = _single(grouped_allgather_async)
reducescatter_async = _single(grouped_reducescatter_async)

allreduce = _blocking(allreduce_async)
allreduce_ = _blocking(allreduce_async_)
broadcast = _blocking(broadcast_async)
broadcast_ = _blocking(broadcast_async_)
allgather = _blocking(allgather_async)
reducescatter = _blocking(reducescatter_async)

grouped_allreduce = _blocking(grouped_allreduce_async)
grouped_allreduce_ = _blocking(grouped_allreduce_async_)
grouped_broadcast = _blocking(grouped_broadcast_async)
grouped_broadcast_ = _blocking(grouped_broadcast_async_)
grouped_allgather = _blocking(grouped_allgather_async)
grouped_reducescatter = _blocking(grouped_reducescatter_async)


@collective(Op.BARRIER)
def _barrier_async(
    process_set: ProcessSet = global_process_set,
    *,
    name: str | None = None,
    timeout: float | None = None,
) -> Handle[None]:
    """Returns when every member has called it. With a `name` any thread may call it.

    Examples:
        >>> hvd.barrier()
    """
    call = Call(Op.BARRIER, name, set_id(process_set))
    return Handle(submit(call, [NOTHING]), lambda _: None, call, timeout)


barrier = _blocking(_barrier_async)
barrier.__name__ = barrier.__qualname__ = "barrier"
