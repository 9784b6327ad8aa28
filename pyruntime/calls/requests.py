# SPDX-License-Identifier: Apache-2.0
"""Requests: how one call becomes farandole_request structures and reaches the core. Every call
passes here, on its caller's thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

from farandole._library import check_count, ffi, is_from_core, lib
from farandole.arrays.buffers import Buffer
from farandole.calls import leases, sites
from farandole.calls.leases import lend, lend_all
from farandole.calls.sites import UNKNOWN, Site, here
from farandole.errors import MismatchError
from farandole.members import ProcessSet, set_id


class Op(IntEnum):
    """Operations; values of the header's enum farandole_op."""

    ALLREDUCE = lib.FARANDOLE_ALLREDUCE
    BROADCAST = lib.FARANDOLE_BROADCAST
    ALLGATHER = lib.FARANDOLE_ALLGATHER
    REDUCESCATTER = lib.FARANDOLE_REDUCESCATTER
    ALLTOALL = lib.FARANDOLE_ALLTOALL
    BARRIER = lib.FARANDOLE_BARRIER
    JOIN = lib.FARANDOLE_JOIN
    ADD_SET = lib.FARANDOLE_ADD_SET
    REMOVE_SET = lib.FARANDOLE_REMOVE_SET
    SCATTER = lib.FARANDOLE_SCATTER
    SEND = lib.FARANDOLE_SEND
    RECEIVE = lib.FARANDOLE_RECEIVE
    REDUCE = lib.FARANDOLE_REDUCE

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
    tag: int = 0
    by_members: bool = False  # add or remove a set: only the ranks in the shape take part

    def __str__(self) -> str:
        return f"{self.op.name.lower()} {self.name!r}" if self.name else f"{self.op.name.lower()}"


Part = tuple[Call, Buffer]  # one tensor of a call
MIRRORED = (Op.ALLREDUCE, Op.BROADCAST)  # results have their input's shape
NOTHING = Buffer(0, 0, (), None)  # for calls without a tensor, or that contribute the identity
_NULL = ffi.NULL
_UNORDERED = frozenset((Op.JOIN, Op.SEND, Op.RECEIVE))  # not matched by order
_cast, _void, _new = ffi.cast, ffi.typeof("void*"), ffi.new

# By process set, the one thread that may make unnamed calls: two threads have no common order.
_callers: dict[int, threading.Thread] = {}
_in_order: set[int] = set()  # sets whose users see to it that all threads' calls have one order
_world = 0  # see world()
_mixed = False  # see is_mixed()
# join() calls of this rank, by process set. Counts of calls or steps restart with each of them:
# ranks that joined early have made fewer.
joins: Counter[int] = Counter()
_scopes: Counter[tuple[str, int]] = Counter()  # in this world, by kind and process set
_at_restart: list[Callable[[], None]] = []
_at_leave: list[Callable[[], None]] = []


def on_restart(forget: Callable[[], None]) -> None:
    """Registers a function that every init() calls, to forget what was under way before."""
    _at_restart.append(forget)


def on_leave(say: Callable[[], None]) -> Callable[[], None]:
    """Registers a function that is called when this rank leaves the job, while it can send."""
    _at_leave.append(say)
    return say


def leave() -> None:
    """Lets all who want to say something before this rank leaves. shutdown() calls this."""
    for say in _at_leave:
        say()


def restart() -> None:
    """Forgets the calls so far. init() calls this."""
    for forget in _at_restart:
        forget()
    _callers.clear()
    _in_order.clear()
    joins.clear()
    _scopes.clear()
    leases.restart()
    sites.restart()


def enter(number: int, before: Iterable[int]) -> None:
    """Notes the next world; `before`: the number of each rank's last one. init() calls this."""
    global _world, _mixed
    _world, _mixed = number, len(set(before)) > 1


def world() -> int:
    """The number of the present or last world in this job's life, from 1, equal on its ranks; 0:
    there was none. What was prepared in another world is invalid."""
    return _world


def is_mixed() -> bool:
    """True if this world has survivors of an earlier one and new ranks: some have made before it
    what others make in it, so the order in which objects are made differs."""
    return _mixed


def next_scope(kind: str, process_set: int) -> str:
    """A name for all calls of one more object, valid in this world; the same on all ranks that ask
    for as many of this kind in the process set."""
    key = kind, process_set
    _scopes[key] += 1
    return f"{kind}.{_scopes[key] - 1}"


class Scope:
    """The name of an object's calls; another one after shutdown() and init()."""

    def __init__(self, kind: str, process_set: ProcessSet) -> None:
        """next_scope() makes the name from these, at its first use."""
        self._kind = kind
        self._set = process_set
        self._world = 0
        self._name = ""

    @property
    def name(self) -> str:
        """For now."""
        if self._world != _world:
            self._world = _world
            self._name = next_scope(self._kind, set_id(self._set))
        return self._name


def note_join(process_set: int) -> None:
    """Counts a join of this rank; all members have joined when it makes its next call."""
    joins[process_set] += 1


def begin_unnamed(call: Call) -> None:
    """To be called before an unnamed call. Raises ValueError in a second thread; the peers' threads
    are refused in the same way."""
    own = threading.current_thread()
    if call.op in _UNORDERED or call.process_set in _in_order:
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


def allow_threads(process_set: int) -> None:
    """Takes unnamed calls in this set from any thread; the caller sees to their order."""
    _in_order.add(process_set)


def count_unnamed(process_set: int) -> int:
    """The number of unnamed calls made in this set, equal on all members."""
    return check_count(lib.farandole_count_unnamed(process_set))


def _fill(request: Any, call: Call, buffer: Buffer, keep: list[Any]) -> None:
    """Writes one tensor's request; what it points to is appended to `keep`."""
    request.op = call.op
    request.reduce_op = call.reduce_op
    request.dtype = buffer.dtype
    request.device = buffer.device
    request.root = call.root
    request.process_set = call.process_set
    request.prescale = call.prescale
    request.postscale = call.postscale
    request.input = _cast(_void, buffer.pointer)
    request.ndim = len(buffer.shape)
    request.shape = shape = _new("int64_t[]", buffer.shape)
    request.n_splits = len(call.splits)
    request.splits = splits = _new("int64_t[]", call.splits)
    request.tag = call.tag
    request.name = text = _NULL if call.name is None else _new("char[]", call.name.encode())
    request.by_members = call.by_members
    if call.op is Op.RECEIVE:
        request.input, request.output = request.output, request.input
    keep += (shape, splits, text)


def _prepare(parts: Sequence[Part], count: int, site: Site, alike: bool = True) -> int:
    """The core's number of a call of these `count` tensors, more than one of which are a group; the
    first one's name is the call's. Raises the core's error, of which peers are not told."""
    requests, keep = _new("farandole_request[]", len(parts)), list[Any]()
    for request, (call, buffer) in zip(requests, parts, strict=True):
        _fill(request, call, buffer, keep)
    requests[0].site = site.pointer
    requests[0].any_site = not (alike and site.alike)
    return check_count(lib.farandole_prepare_call(requests, count))


def submit(
    call: Call,
    buffers: Sequence[Buffer],
    outputs: Sequence[Buffer] = (),
    own: int = 0,
    alike: bool = True,
) -> Any:
    """Submits the tensors of one call, more than one as a group; returns int64_t[] of handles.
    `own`: how many frames, that of the caller first, are known to be farandole's; 0: the call has
    no site. `alike`: whether all ranks make it in one.

    A call without tensors has one handle too: it waits for the peers, which must have none either.
    Without `outputs` the core allocates, or there is nothing to write. Raises the core's error
    about wrong arguments; peers then fail too.
    """
    if call.name is None:
        begin_unnamed(call)
    outputs = outputs or [NOTHING] * len(buffers)
    site = here(own + 2) if own else UNKNOWN
    memory: list[object] = list(zip(buffers, outputs, strict=True)) or [None]
    parts = [(call, buffer) for buffer in buffers]
    nothing = replace(call, op=Op.BARRIER), NOTHING  # peers with tensors get an error
    try:
        number = _prepare(parts or [nothing], len(parts), site, alike)
    except Exception as reason:
        refuse(call, reason, buffers[0].shape if call.by_members else ())
        raise told(reason) from None
    try:
        return _submit_tensors(
            number,
            [buffer.pointer for buffer in buffers] or [0],
            [buffer.pointer for buffer in outputs] or [0],
            [buffer.stream for buffer in buffers],
            memory,
        )
    finally:
        lib.farandole_forget_prepared(number)


def _submit_tensors(
    number: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    streams: Sequence[int],
    memory: Sequence[object],
) -> Any:
    """Submits all tensors of a prepared call; returns int64_t[] of handles. Raises the core's
    error, which the peers get too."""
    ordered = _new("uint64_t[]", streams) if any(streams) else _NULL
    addresses = _new("uintptr_t[]", inputs), _new("uintptr_t[]", outputs)
    made, failure = lend_all(_new("int64_t[]", (number,)), *addresses, ordered, memory, 1)
    if failure is not None:
        raise told(failure)
    return made


_REFUSALS = (
    (TypeError, lib.FARANDOLE_E_TYPE),
    (MismatchError, lib.FARANDOLE_E_MISMATCH),
    (RuntimeError, lib.FARANDOLE_E_LIBRARY),
)


def told(reason: Exception) -> Exception:
    """Marks an error as reported to the peers."""
    reason._told = True  # type: ignore[attr-defined]
    return reason


def is_told(reason: Exception) -> bool:
    """Whether this error was reported to the peers, by the core or by public_call."""
    return getattr(reason, "_told", False)


def refuse(call: Call, reason: Exception, ranks: Sequence[int] = ()) -> None:
    """Tells the peers of a call, of all its tensors, that this rank cannot take part, and why.
    `ranks`: of a set that its members make."""
    refuse_all([call], reason, ranks=ranks)


def refuse_all(
    calls: Sequence[Call],
    reason: Exception,
    ranks: Sequence[int] = (),
) -> None:
    """Tells the peers of each call that this rank cannot take part, and why. `ranks`: as in
    refuse()."""
    said = str(reason) if is_from_core(reason) else f"{type(reason).__name__}: {reason}"
    text = _new("char[]", said.encode(errors="replace"))
    codes = (code for kind, code in _REFUSALS if isinstance(reason, kind))
    code = next(codes, lib.FARANDOLE_E_ARGUMENT)
    own, keep = threading.current_thread(), list[Any]()
    for call in calls:
        if (
            call.name is None
            and call.op not in _UNORDERED
            and _callers.get(call.process_set, own) != own
        ):
            continue  # this thread's calls have no place in the order
        request = _new("farandole_request*")
        _fill(request, call, Buffer(0, 0, tuple(ranks), None), keep)
        lib.farandole_refuse(request, code, text)


class PreparedCall:
    """A call that is submitted repeatedly, by one C call each time. For adapters' hooks."""

    __slots__ = ("call", "current", "number", "start", "stream")

    def __init__(
        self,
        call: Call,
        buffer: Buffer,
        pointers: bool = False,
        site: Site = UNKNOWN,
        current: Callable[[], int] | None = None,
    ) -> None:
        """`buffer` gives dtype, shape, device and stream; its pointer is not used.

        `pointers`: start() gets cffi pointers, not numbers. `site`: of all its submissions.
        `current` returns the current stream, for submit() on a GPU. Raises the core's error about
        wrong arguments. Valid until shutdown().
        """
        self.number = 0  # by which the core knows it
        self.current = current
        self.stream = 0  # of the last submit() on a GPU
        self.number = _prepare([(call, buffer)], 1, site)
        # On the CPU, (input, output) -> the core handle's number, or -code for check_count().
        submit = lib.farandole_submit_pointers if pointers else lib.farandole_submit_one
        self.start: Callable[[Any, Any], int] = partial(submit, self.number)
        # The same for a caller that only waits; 0: the call is done.
        at_once = lib.farandole_call_pointers if pointers else lib.farandole_call_one
        self.call: Callable[[Any, Any], int] = partial(at_once, self.number)

    def submit(self, input: int, output: int, memory: object) -> int:
        """Submits with these addresses (input 0: the identity); returns the core's handle.

        `memory` is what they point into, kept until the core is done with it. After a wait the
        caller ends the handle by farandole.calls.leases.
        """
        if self.current is None:
            return lend(self.start, input, output, memory)
        self.stream = stream = self.current()
        return self.submit_on(input, output, stream, memory)

    def submit_on(self, input: int, output: int, stream: int, memory: object) -> int:
        """The same on a GPU, where the input is produced in this stream."""
        made = _submit_tensors(self.number, (input,), (output,), (stream,), (memory,))
        return made[0]  # type: ignore[no-any-return]

    def close(self, forget: Any = lib.farandole_forget_prepared) -> None:
        """Forgets the call, as the end of this object does."""
        forget(getattr(self, "number", 0))  # an exception may have come before __init__

    __del__ = close
