# SPDX-License-Identifier: Apache-2.0
"""The start of collectives on arrays: the public calls of this package submit themselves by these
functions, and so do adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farandole.arrays.buffers import Buffer, check_apart
from farandole.arrays.kinds import Kind, kind_of
from farandole.calls.arguments import ReduceOp, shown
from farandole.calls.gpu_handle import GpuHandle
from farandole.calls.handles import Handle, take
from farandole.calls.prepared import RepeatedCall
from farandole.calls.requests import Call, Op, submit
from farandole.calls.rows import Table
from farandole.errors import warn
from farandole.members import ProcessSet, set_id

T = TypeVar("T")
R = TypeVar("R")

Average, Sum, Adasum, Min, Max, Product = ReduceOp
# Reductions that consist of several calls of this package. Their modules register them.
composed: dict[int, Callable[..., Handle[Any]]] = {}


def start(
    call: Call, tensors: Sequence[T], timeout: float | None, in_place: bool = False
) -> Handle[list[T]]:
    """Submits `call`, one of MIRRORED, over `tensors`: in place or into new arrays."""
    tensors = list(tensors)
    if not tensors:
        return Handle(submit(call, [], own=3), lambda _: [], call, timeout)
    kinds, inputs = describe(tensors, in_place)
    results, outputs = tensors, inputs
    if in_place and call.op is not Op.BROADCAST:
        check_apart(inputs)
    if not in_place:
        results, outputs = new_results(kinds, tensors, inputs)

    def collect(_: Any) -> list[T]:
        return results if in_place else sealed(kinds, results, tensors)

    numbers = submit(call, inputs, outputs, own=3)
    handle = handle_of(numbers, inputs, tensors, collect, call, timeout)
    if len(tensors) == 1 and (in_place or kinds[0].gives_itself()):
        handle.prepared = RepeatedCall(call, tensors[0], inputs[0], in_place, timeout)
    return handle


def start_rows(
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
    return handle_of(numbers, inputs, tensors, collect if tensors else lambda _: [], call, timeout)


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


def handle_of(
    numbers: Any,
    inputs: Sequence[Buffer],
    tensors: Sequence[Any],
    collect: Callable[[Any], R],
    what: object,
    timeout: float | None,
) -> Handle[R]:
    """A handle of the core's numbers, for arrays in this kind of memory, CPU or GPU."""
    for buffer, x in zip(inputs, tensors, strict=True):
        if buffer.device >= 0:
            stream = functools.partial(kind_of(x).stream, x)
            return GpuHandle(numbers, collect, what, timeout, stream)
    return Handle(numbers, collect, what, timeout)


def one(handle: Handle[list[T]]) -> Handle[T]:
    """The handle of a call on one array, from that of the call on a list of it."""
    return handle.map(_first)


def _first(results: list[T]) -> T:
    return results[0]


def reduction(
    op: Op,
    reduce_op: int | None,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> Call:
    """A call that reduces, by default to the average. Raises the error about a wrong reduction."""
    reduce_op = Average if reduce_op is None else ReduceOp(reduce_op)
    if op is not Op.ALLREDUCE and reduce_op is Adasum:
        raise NotImplementedError(
            "op is Adasum, which is defined for allreduce only: pass Sum or Average, or allreduce "
            "with op=Adasum and keep the part you need"
        )
    before, after = map(float, factors)
    return Call(op, name, set_id(process_set), reduce_op, before, after)


def reduce_op_of(op: int | None, average: bool | None) -> int:
    """The reduction of a call; `average` is Horovod's deprecated argument for it."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(
            f"op is {shown(op)} and average is {shown(average)}: pass one of the two, not both; "
            "average is deprecated"
        )
    warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning)
    return Average if average else Sum
