# SPDX-License-Identifier: Apache-2.0
"""Converts each call to farandole_request structures and submits them to the core. Every call uses
this module on the thread of its caller."""

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
    """The operations. Their values are those of enum farandole_op in the header."""

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

    __hash__ = int.__hash__  # Enum's __hash__ is slow


@dataclass(frozen=True, slots=True)
class Call:
    """The fields that all tensors of one call share. See farandole_request in the header."""

    op: Op
    name: str | None = None
    process_set: int = 0
    reduce_op: int = 1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    tag: int = 0
    # True if only the members of a set add or remove it. The request's shape then lists them.
    by_members: bool = False

    def __str__(self) -> str:
        return f"{self.op.name.lower()} {self.name!r}" if self.name else f"{self.op.name.lower()}"


Part = tuple[Call, Buffer]  # one tensor of a call
MIRRORED = (Op.ALLREDUCE, Op.BROADCAST)  # results have the same shape as the input
NOTHING = Buffer(0, 0, (), None)  # for calls that have no tensor or contribute the identity
_NULL = ffi.NULL
_UNORDERED = frozenset((Op.JOIN, Op.SEND, Op.RECEIVE))  # not matched by their order
_cast, _void, _new = ffi.cast, ffi.typeof("void*"), ffi.new

# Maps a process set to the one thread that may make unnamed calls, which match by their order.
_callers: dict[int, threading.Thread] = {}
_in_order: set[int] = set()  # sets in which the callers order calls across their threads
_world = 0  # see world()
_mixed = False  # see is_mixed()
# This rank's number of join() calls, by process set. Each join() restarts the counts of calls and
# steps, because ranks that joined early have made fewer of them.
joins: Counter[int] = Counter()
# Number of objects made in this world, by kind and process set.
_scopes: Counter[tuple[str, int]] = Counter()
_at_restart: list[Callable[[], None]] = []
_at_leave: list[Callable[[], None]] = []


def on_restart(forget: Callable[[], None]) -> None:
    """Registers a function that every init() calls to drop state of the previous world."""
    _at_restart.append(forget)


def on_leave(say: Callable[[], None]) -> Callable[[], None]:
    """Registers a function to call when this rank leaves the job, while it can still send."""
    _at_leave.append(say)
    return say


def leave() -> None:
    """Calls the functions that on_leave() has registered. shutdown() calls this."""
    for say in _at_leave:
        say()


def restart() -> None:
    """Forgets all earlier calls. init() calls this."""
    for forget in _at_restart:
        forget()
    _callers.clear()
    _in_order.clear()
    joins.clear()
    _scopes.clear()
    leases.restart()
    sites.restart()


def enter(number: int, before: Iterable[int]) -> None:
    """Stores the new world's number and compares the ranks' previous worlds. Called by init()."""
    global _world, _mixed
    _world, _mixed = number, len(set(before)) > 1


def world() -> int:
    """Returns the number of the present or last world. Worlds are counted from 1; the number is 0
    before the first one. The number is equal on all ranks of a world. Calls that were prepared in
    an earlier world are invalid."""
    return _world


def is_mixed() -> bool:
    """Returns True if this world has both new ranks and survivors of an earlier world. Survivors
    already have the objects that new ranks create now, so ranks create objects in different
    orders."""
    return _mixed


def next_scope(kind: str, process_set: int) -> str:
    """Returns a name for a new object's calls. The name is valid in this world. Ranks get the same
    name if they have made the same number of objects of this kind in the process set."""
    key = kind, process_set
    _scopes[key] += 1
    return f"{kind}.{_scopes[key] - 1}"


def give_scope_back(kind: str, process_set: int) -> None:
    """Undoes the last next_scope(), because the object could not be made. A second try then gets
    the same name, which is that of the object on ranks whose first try has succeeded."""
    _scopes[kind, process_set] -= 1


class Scope:
    """The name of an object's calls. It changes after shutdown() and init()."""

    def __init__(self, kind: str, process_set: ProcessSet) -> None:
        """`kind` and the set are passed to next_scope() when the name is first needed."""
        self._kind = kind
        self._set = process_set
        self._world = 0
        self._name = ""

    @property
    def name(self) -> str:
        """The name in the present world."""
        if self._world != _world:
            self._world = _world
            self._name = next_scope(self._kind, set_id(self._set))
        return self._name


def note_join(process_set: int, count: int = 1) -> None:
    """Counts this rank's joins. All members have joined before this rank makes its next call."""
    joins[process_set] += count


def begin_unnamed(call: Call) -> None:
    """Must be called before an unnamed call. Raises ValueError if another living thread makes
    unnamed calls in this set. The error is not reported to the peers, because the same program
    raises it on each of them."""
    own = threading.current_thread()
    if call.op in _UNORDERED or call.process_set in _in_order:
        return
    caller = _callers.setdefault(call.process_set, own)
    if caller is own:
        return
    if caller.is_alive():
        raise ValueError(
            f"unnamed {call} from thread {own.name!r}: calls without a name match by their order, "
            f"and thread {caller.name!r} already makes such calls; give it a name, name=..."
        )
    _callers[call.process_set] = own


def allow_threads(process_set: int) -> None:
    """Allows unnamed calls in this set from any thread. The caller must guarantee their order."""
    _in_order.add(process_set)


def count_unnamed(process_set: int) -> int:
    """Returns the number of unnamed calls made so far in this set. It is equal on all members."""
    return check_count(lib.farandole_count_unnamed(process_set))


def _fill(request: Any, call: Call, buffer: Buffer, keep: list[Any]) -> None:
    """Fills in the request for one tensor. Adds to `keep` the memory to which the request
    points."""
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
    """Prepares a call on `count` tensors. If there are several, they form a group that has the name
    of the first tensor. Returns the call's number in the core. Raises the core's error, which is
    not reported to the peers."""
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
    """Submits a call's tensors, as a group if there are several. Returns handles as int64_t[].

    `own` is the number of stack frames, counted from this function's caller outwards, that are
    known to belong to farandole. If `own` is 0, the call has no site. `alike` is True if all ranks
    make this call on the same line of the program. A call without tensors also gets a handle, which
    waits for the peers; they must pass no tensors either. Without `outputs`, the core allocates the
    results. Raises the core's error if arguments are wrong, in which case the peers also fail.
    """
    if call.name is None:
        begin_unnamed(call)
    outputs = outputs or [NOTHING] * len(buffers)
    site = here(own + 2) if own else UNKNOWN
    memory: list[object] = list(zip(buffers, outputs, strict=True)) or [None]
    parts = [(call, buffer) for buffer in buffers]
    nothing = replace(call, op=Op.BARRIER), NOTHING  # peers that have tensors get an error
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
    """Submits all tensors of a prepared call. Returns the handles as int64_t[]. Raises the core's
    error, which the peers also get."""
    ordered = _new("uint64_t[]", streams) if any(streams) else _NULL
    addresses = _new("uintptr_t[]", inputs), _new("uintptr_t[]", outputs)
    made, failure = lend_all(_new("int64_t[]", (number,)), *addresses, ordered, memory, 1)
    if failure is not None:
        raise told(failure)
    return made


_REFUSALS = (
    (TypeError, lib.FARANDOLE_E_TYPE),
    (MismatchError, lib.FARANDOLE_E_MISMATCH),
    (NotImplementedError, lib.FARANDOLE_E_ARGUMENT),  # with LIBRARY, elastic training would retry
    (RuntimeError, lib.FARANDOLE_E_LIBRARY),
)


def told(reason: Exception) -> Exception:
    """Marks an error as reported to the peers and returns it."""
    reason._told = True  # type: ignore[attr-defined]
    return reason


def is_told(reason: Exception) -> bool:
    """Returns True if the core or public_call has reported this error to the peers."""
    return getattr(reason, "_told", False)


def refuse(call: Call, reason: Exception, ranks: Sequence[int] = ()) -> None:
    """Reports to a call's peers that this rank cannot take part, and why. If the call adds or
    removes a process set, `ranks` holds the members of the set."""
    refuse_all([call], reason, ranks=ranks)


def refuse_all(
    calls: Sequence[Call],
    reason: Exception,
    ranks: Sequence[int] = (),
) -> None:
    """Does the same as refuse() for each of these calls."""
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
            continue  # peers do not match unnamed calls of this thread
        request = _new("farandole_request*")
        _fill(request, call, Buffer(0, 0, tuple(ranks), None), keep)
        lib.farandole_refuse(request, code, text)


class PreparedCall:
    """A call that adapters' hooks submit repeatedly, each time by a single C call."""

    __slots__ = ("call", "current", "number", "start", "stream")

    def __init__(
        self,
        call: Call,
        buffer: Buffer,
        pointers: bool = False,
        site: Site = UNKNOWN,
        current: Callable[[], int] | None = None,
    ) -> None:
        """`buffer` provides the dtype, shape and device of the call's tensor.

        `pointers` is True if start() gets cffi pointers instead of numbers. `site` is the site of
        all submissions. `current` returns the current stream, which submit() needs on a GPU. Raises
        the core's error if arguments are wrong. The prepared call is valid until shutdown().
        """
        self.number = 0  # the call's number in the core
        self.current = current
        self.stream = 0  # the stream of the last submit() on a GPU
        self.number = _prepare([(call, buffer)], 1, site)
        # On the CPU, submits (input, output). Returns the core's handle, or a negated error code
        # for check_count().
        submit = lib.farandole_submit_pointers if pointers else lib.farandole_submit_one
        self.start: Callable[[Any, Any], int] = partial(submit, self.number)
        # Does the same for a caller that waits at once. Also returns 0 if the call is already done.
        at_once = lib.farandole_call_pointers if pointers else lib.farandole_call_one
        self.call: Callable[[Any, Any], int] = partial(at_once, self.number)

    def submit(self, input: int, output: int, memory: object) -> int:
        """Submits the memory at these addresses and returns the core's handle. An `input` of 0
        contributes the identity.

        `memory` is the object that owns these addresses. It is kept until the core is done with it.
        After a wait, the caller must end the handle through farandole.calls.leases.
        """
        if self.current is None:
            return lend(self.start, input, output, memory)
        self.stream = stream = self.current()
        return self.submit_on(input, output, stream, memory)

    def submit_on(self, input: int, output: int, stream: int, memory: object) -> int:
        """Submits on a GPU. The work in `stream` produces the input."""
        made = _submit_tensors(self.number, (input,), (output,), (stream,), (memory,))
        return made[0]  # type: ignore[no-any-return]

    def close(self, forget: Any = lib.farandole_forget_prepared) -> None:
        """Makes the core forget the call. __del__ does the same."""
        forget(getattr(self, "number", 0))  # an exception may have come before __init__ ran

    __del__ = close
