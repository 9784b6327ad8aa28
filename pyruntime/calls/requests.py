# SPDX-License-Identifier: Apache-2.0
"""Requests: how one call becomes farandole_request structures and reaches the core."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

from farandole._library import check_count, ffi, lib
from farandole.arrays.buffers import NOWHERE, Buffer
from farandole.calls import leases
from farandole.calls.leases import lend, lend_all

__all__ = [
    "NOTHING",
    "Call",
    "Op",
    "PreparedOnGpu",
    "PreparedTensor",
    "begin_unnamed",
    "count_unnamed",
    "is_told",
    "refuse",
    "refuse_all",
    "submit",
    "told",
]


class Op(IntEnum):
    """Operations; values of enum farandole_op."""

    ALLREDUCE = 0
    BROADCAST = 1
    ALLGATHER = 2
    REDUCESCATTER = 3
    ALLTOALL = 4
    BARRIER = 5
    JOIN = 6
    ADD_SET = 7
    REMOVE_SET = 8
    SCATTER = 9

    __hash__ = int.__hash__  # that of Enum is slow


@dataclass(frozen=True, slots=True)
class Call:
    """What the tensors of one call have in common; fields as in farandole_request."""

    op: Op
    name: str | None = None
    process_set: int = 0
    reduce_op: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op.name.lower()} {self.name!r}" if self.name else f"{self.op.name.lower()}"


NOTHING = Buffer(0, 0, (), None)  # of calls that carry no tensor, or contribute the identity
_NULL = ffi.NULL
_cast, _void, _new = ffi.cast, ffi.typeof("void*"), ffi.new

# The thread whose unnamed calls a process set takes: two threads have no order.
_callers: dict[int, threading.Thread] = {}
_generation = 0
_joins: Counter[int] = Counter()  # of this rank, by process set
_at_restart: list[Callable[[], None]] = []


def on_restart(forget: Callable[[], None]) -> None:
    """Has `forget` called by every init(): what was under way has ended."""
    _at_restart.append(forget)


def restart() -> None:
    """Forgets the unnamed calls so far. init() calls this."""
    global _generation
    for forget in _at_restart:
        forget()
    _callers.clear()
    _joins.clear()
    leases.restart()
    _generation += 1


def generation() -> int:
    """How often init() has started the core: tensors prepared in an older one are void."""
    return _generation


def joins(process_set: int) -> int:
    """How often this rank has joined in a set. Counts of calls or steps begin anew with each:
    ranks that joined early have made fewer."""
    return _joins[process_set]


def note_join(process_set: int) -> None:
    """This rank has joined; all members will have when it calls again."""
    _joins[process_set] += 1


def _check_thread(call: Call) -> None:
    """Refuses unnamed calls of a second thread. Its peers have to make the same mistake."""
    own = threading.current_thread()
    if call.op is Op.JOIN:  # which meets others by no order
        return
    caller = _callers.setdefault(call.process_set, own)
    if caller is own:
        return
    if caller.is_alive():
        raise ValueError(
            f"unnamed {call} from thread {own.name!r}: calls without a name meet by their order, "
            f"and thread {caller.name!r} makes such calls already; give it a name, name=..."
        )
    _callers[call.process_set] = own


def begin_unnamed(call: Call) -> None:
    """Before an unnamed call on one prepared tensor. Raises ValueError in a second thread."""
    _check_thread(call)


def count_unnamed(process_set: int) -> int:
    """How many unnamed calls of this set have been made: on all its members the same number."""
    return check_count(lib.farandole_count_unnamed(process_set))


def _fill(
    request: Any, call: Call, buffer: Buffer, output: int, name: str | None, keep: list[Any]
) -> None:
    """Writes one request; what it points at goes into `keep`."""
    request.op = call.op
    request.reduce_op = call.reduce_op
    request.dtype = buffer.dtype
    request.device = buffer.device
    request.root = call.root
    request.process_set = call.process_set
    request.prescale = call.prescale
    request.postscale = call.postscale
    request.stream = buffer.stream
    if buffer.place is not NOWHERE:
        request.window, request.place = buffer.place
    request.input = _cast(_void, buffer.pointer)
    request.output = _cast(_void, output)
    request.ndim = len(buffer.shape)
    request.shape = shape = _new("int64_t[]", buffer.shape)
    request.n_splits = len(call.splits)
    request.splits = splits = _new("int64_t[]", call.splits)
    request.name = text = _NULL if name is None else _new("char[]", name.encode())
    request.group = _NULL
    request.group_size = 1
    keep += (shape, splits, text)


def _requests(call: Call, buffers: Sequence[Buffer], outputs: Sequence[int]) -> tuple[Any, Any]:
    """farandole_request[] for one call, and what must live while the core copies it."""
    count = len(buffers)
    requests = _new("farandole_request[]", count)
    keep: list[Any] = []
    # A group goes by the name of its first tensor. The core names unnamed ones, by their order.
    grouped = call.name is not None and count > 1
    text = _new("char[]", call.name.encode()) if call.name is not None and grouped else _NULL
    keep.append(text)
    for i, (buffer, output) in enumerate(zip(buffers, outputs, strict=True)):
        name = call.name
        if grouped and i > 0:
            name = f"{name}_{i + 1}of{count}"
        _fill(requests[i], call, buffer, output, name, keep)
        requests[i].group = text
        requests[i].group_size = count
    if count == 0:
        return _of_nothing(call, keep), keep
    return requests, keep


def _of_nothing(call: Call, keep: list[Any]) -> Any:
    """The request of a group without tensors: it meets one with some, which is an error."""
    requests = _new("farandole_request[]", 1)
    _fill(requests[0], replace(call, op=Op.BARRIER), NOTHING, 0, call.name, keep)
    requests[0].group_size = 0
    return requests


def submit(call: Call, buffers: Sequence[Buffer], outputs: Sequence[Buffer] = ()) -> Any:
    """Submits the tensors of one call, more than one as a group; returns int64_t[] of handles.

    No tensors at all have one handle too: that rank waits for its peers, who must have none either.
    Without `outputs` the core allocates, or there is nothing to write. Raises what the core finds
    wrong with the arguments; peers then fail too.
    """
    if call.name is None:
        _check_thread(call)
    outputs = outputs or [NOTHING] * len(buffers)
    requests, keep = _requests(call, buffers, [buffer.pointer for buffer in outputs])
    memory: list[object] = list(zip(buffers, outputs, strict=True)) or [None]
    numbers = lend_all(requests, len(requests), memory)
    del keep
    if isinstance(numbers, Exception):
        raise told(numbers)
    return numbers


_REFUSALS = ((TypeError, lib.FARANDOLE_E_TYPE), (RuntimeError, lib.FARANDOLE_E_LIBRARY))


def told(reason: Exception) -> Exception:
    """Marks an error that the peers know of."""
    reason._told = True  # type: ignore[attr-defined]
    return reason


def is_told(reason: Exception) -> bool:
    """Whether the peers know of this error: the core has told them, or a door."""
    return getattr(reason, "_told", False)


def refuse(call: Call, reason: Exception) -> None:
    """Tells the peers of a call, of all its tensors, that this rank cannot take part, and why."""
    if (
        call.name is None
        and call.op is not Op.JOIN
        and _callers.get(call.process_set, own := threading.current_thread()) != own
    ):
        return  # this thread has no place in their order
    keep: list[Any] = []
    request = _new("farandole_request*")
    _fill(request, call, NOTHING, 0, call.name, keep)
    text = _new("char[]", f"{type(reason).__name__}: {reason}".encode(errors="replace"))
    code = next((c for kind, c in _REFUSALS if isinstance(reason, kind)), lib.FARANDOLE_E_ARGUMENT)
    lib.farandole_refuse(request, code, text)


def refuse_all(calls: list[Call], reason: Exception) -> None:
    """As refuse(), of each."""
    for call in calls:
        refuse(call, reason)


class PreparedTensor:
    """A tensor that is submitted again and again: one C call each time, for adapters' hooks."""

    __slots__ = ("number", "start", "start_on")

    def __init__(
        self,
        call: Call,
        buffer: Buffer,
        group: str | None = None,
        group_size: int = 1,
        pointers: bool = False,
    ) -> None:
        """`buffer` gives dtype, shape, device and stream; its pointer is not used.

        `pointers`: start() gets pointers of cffi, not numbers. Raises what the core finds wrong
        with the arguments. Valid until shutdown().
        """
        self.number = 0  # the core's
        keep: list[Any] = []
        request = _new("farandole_request*")
        _fill(request, call, buffer, 0, call.name, keep)
        if group is not None:
            request.group = text = _new("char[]", group.encode())
            request.group_size = group_size
            keep.append(text)
        self.number = check_count(lib.farandole_tensor(request))
        submit = lib.farandole_submit_buffer if pointers else lib.farandole_submit_tensor
        # (input, output) -> the core handle's number, or -code for check_count().
        self.start: Callable[[Any, Any], int] = partial(submit, self.number)
        # The same on a GPU: (input, output, stream).
        self.start_on: Callable[[int, int, int], int] = partial(
            lib.farandole_submit_tensor_on, self.number
        )

    def submit(self, input: int, output: int, memory: object) -> int:
        """Submits with these addresses (input 0: the identity); returns the core's handle.

        `memory` is what they point into. Who has waited for the handle ends it, by
        farandole.calls.leases.
        """
        return lend(self.start, input, output, memory)

    def close(self, forget: Any = lib.farandole_forget_tensor) -> None:
        """Forgets the tensor; so does the end of this object."""
        forget(self.number)

    __del__ = close


class PreparedOnGpu:
    """A prepared tensor on a GPU: each time in the stream that its caller then uses."""

    __slots__ = ("_current", "_tensor", "close", "stream")

    def __init__(self, tensor: PreparedTensor, current: Callable[[], int]) -> None:
        """`current` gives that stream."""
        self._tensor = tensor
        self._current = current
        self.close = tensor.close
        self.stream = 0  # of the last submission

    def submit(self, input: int, output: int, memory: object) -> int:
        """As in PreparedTensor; `memory` is kept until the GPU is done with it."""
        self.stream = stream = self._current()
        start = self._tensor.start_on
        return lend(lambda source, target: start(source, target, stream), input, output, memory)
