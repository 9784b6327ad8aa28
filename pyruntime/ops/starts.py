# SPDX-License-Identifier: Apache-2.0
"""Submits collectives on arrays, for the public calls in this package and for adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farandole.arrays.buffers import Buffer, check_apart
from farandole.arrays.kinds import Kind, kind_of
from farandole.calls import arguments
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
# Reductions that consist of several calls. The modules that implement them register here.
composed: dict[int, Callable[..., Handle[Any]]] = {}


def start(
    call: Call, tensors: Sequence[T], timeout: float | None, in_place: bool = False
) -> Handle[list[T]]:
    """Submits `call` on `tensors`, in place or into new arrays. `call.op` must be in MIRRORED."""
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
    """Submits a call whose results' shapes depend on all ranks.

    The handle's wait() returns each result together with the number of rows from each member. This
    number is 0 for a member that has joined.
    """
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
    """Creates arrays for results that have the same form as the inputs. Returns these arrays and
    their buffers. See also sealed()."""
    triples = zip(kinds, tensors, inputs, strict=True)
    results = [kind.empty(x, buffer.shape) for kind, x, buffer in triples]
    return results, [k.describe(y, True) for k, y in zip(kinds, results, strict=True)]


def sealed(kinds: Sequence[Kind], results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Converts complete arrays from new_results() to those that the user gets."""
    return [k.sealed(y, x) for k, y, x in zip(kinds, results, tensors, strict=True)]


def describe(tensors: Sequence[Any], in_place: bool) -> tuple[list[Kind], list[Buffer]]:
    """Returns arrays' kinds and buffers. Raises a TypeError or ValueError that names the array."""
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
    """Wraps the core's handles in a GpuHandle if an array is on a GPU, or else in a Handle."""
    for buffer, x in zip(inputs, tensors, strict=True):
        if buffer.device >= 0:
            stream = functools.partial(kind_of(x).stream, x)
            return GpuHandle(numbers, collect, what, timeout, stream)
    return Handle(numbers, collect, what, timeout)


def one(handle: Handle[list[T]]) -> Handle[T]:
    """Converts a handle for a list of one array to a handle for that array."""
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
    """Returns a Call that reduces. If `reduce_op` is None, uses Average. Raises NotImplementedError
    if `reduce_op` is not allowed for `op`."""
    reduce_op = Average if reduce_op is None else ReduceOp(reduce_op)
    if op is not Op.ALLREDUCE and reduce_op is Adasum:
        raise NotImplementedError(
            "op is Adasum, which is defined for allreduce only: pass Sum or Average, or allreduce "
            "with op=Adasum and keep the part you need"
        )
    # number() never returns None here, because the factors have been checked.
    before, after = (x if type(x) is float else arguments.number(x) or 0.0 for x in factors)
    return Call(op, name, set_id(process_set), reduce_op, before, after)


def reduce_op_of(op: int | None, average: bool | None) -> int:
    """Returns the reduction to use. `average` is Horovod's deprecated argument."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(
            f"op is {shown(op)} and average is {shown(average)}: pass one of the two, not both; "
            "average is deprecated"
        )
    warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning)
    return Average if average else Sum
