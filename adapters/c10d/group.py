# SPDX-License-Identifier: Apache-2.0
"""The process group for torch.distributed. Its methods may be called from any thread.

Calls have no names. The core matches them by their order in the group's process set. torch requires
that all ranks make calls in the same order, even if several threads make them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from farandole.arrays.buffers import Buffer, check_apart
from farandole.c10d import memory_in_use, messages
from farandole.c10d.calls import PLANS, Options, Plan, Tensors, check_writable
from farandole.c10d.prepared import PreparedPlan, key_of, prepare
from farandole.c10d.work import Futures, GroupWork, name_in_callback
from farandole.calls import part
from farandole.calls.handles import OneHandle, take, wait_until
from farandole.calls.leases import in_flight
from farandole.calls.requests import NOTHING, Call, Op, is_told, refuse, submit, told
from farandole.errors import ShutdownError
from farandole.ops.starts import describe, handle_of
from farandole.process_sets import ProcessSet, disband_process_set
from farandole.torch.compiling import stay_outside

__all__ = ["FarandoleGroup"]

_MANY = 1000  # if the group has more handles than this, it drops the handles of ended calls
# Since torch 2.8, c10d sets `asyncOp` for all collectives, and accepts None as the work of a
# synchronous call. Earlier versions set it for two collectives only, and wait for every work.
_WORK_MAY_BE_NONE = hasattr(AllreduceOptions, "asyncOp")
_PLACES = 1024  # largest number of calls whose futures may run callbacks at the same time
_MOST_PREPARED = 256  # largest number of prepared calls of one group
# Asymmetric collectives, for which ranks may make the same call on different lines of the program.
_UNLIKE = ("gather", "reduce")
Uses = tuple[list[Any], list[Any]]


class FarandoleGroup(ProcessGroup):
    """A group of ranks with c10d's collectives.

    Each row of PLANS, in c10d/calls.py, defines one method.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(self, members: ProcessSet, label: str, timeout: timedelta, store: Any) -> None:
        """`members` is a process set that only this group uses. Errors call the group `label`."""
        self.ranks: list[int] = members.ranks or []
        place: Any = (members.rank(), len(self.ranks))  # torch has no stub of this __init__
        super().__init__(*place)
        self.label = label
        self._set = members
        self._store = store
        self._timeout = timeout
        self._futures = Futures()
        self._calls = 0
        self._numbers: list[int] = []  # handles of calls that may still be under way
        self._prepared: dict[Hashable, PreparedPlan] = {}  # keys are made by key_of()
        self._name = self._description = ""
        self._end = weakref.finalize(self, _end, members, label, self._futures)
        self._end.atexit = False

    # ---- calls

    def start(self, kind: str, *args: Any, **kwargs: Any) -> Work | None:
        """Starts the collective that c10d calls `kind`. Reports an error to the other ranks.

        Returns None if the options ask for a synchronous call and the call is complete.
        """
        stay_outside()
        number = self._number_of_set(kind)
        name = name_in_callback(number, self.ranks)
        if name is None:
            self._calls += 1
            key, x, y, given = key_of(kind, args, kwargs)
        else:
            key = x = y = given = None
        try:
            plan = self._prepared.get(key)
            # A barrier must also wait for calls in flight. A prepared plan cannot do that.
            if plan is not None and not (kind == "barrier" and self._in_flight()):
                if memory_in_use.count():
                    memory_in_use.wait_for_users(*self._uses(kind, x, y, given))
                handle = plan.start(x, y, _WORK_MAY_BE_NONE and not given.asyncOp)
                if handle is not None:
                    return self._work(handle, kind, x, y, given) if handle else None
            work, new, call, buffer = self._start_planned(kind, args, kwargs, name)
            if key is not None and (plan := prepare(kind, self.rank(), new, call, buffer, x, y)):
                if len(self._prepared) >= _MOST_PREPARED:
                    self._prepared.clear()
                self._prepared[key] = plan
            return work
        except Exception as reason:
            if not is_told(reason):
                refuse(Call(PLANS[kind][0], name, number), reason)
            raise told(reason) from reason.__cause__
        except BaseException as reason:
            part.end(reason)
            raise

    def _start_planned(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
    ) -> tuple[GroupWork, Plan, Call, Buffer]:
        """Plans and submits a call.

        Returns the Work, the Plan, and the Call and Buffer that prepare() needs.
        """
        _, plan_of, names = PLANS[kind]
        count = plan_of.__code__.co_argcount - 2
        args, options = _options(names, args, kwargs, count)
        memory_in_use.wait_for_users(_tensors(args), ())  # plan_of() may copy the tensors
        plan = plan_of(self, *args, options)
        memory_in_use.wait_for_users((), plan.writes())
        check_writable(plan)
        work, call, buffer = self._submit(kind, plan, options, name)
        return work, plan, call, buffer

    def _work(
        self, number: int, kind: str, x: Tensor | None, y: Tensor | None, options: Any
    ) -> GroupWork:
        """Returns the Work object of a prepared call that is running."""
        self._note([number])
        seconds = options.timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._timeout.total_seconds()
        results = [] if y is None else [y]
        handle = OneHandle(number, results, self._text(kind), seconds)
        work = GroupWork(handle, results, self._futures, [], self._place(), self.ranks)
        # Records the tensors even if the caller will wait at once, because that wait may time out.
        memory_in_use.add(work, *self._uses(kind, x, y, options))
        return work

    def _uses(self, kind: str, x: Tensor | None, y: Tensor | None, options: Any) -> Uses:
        """Returns the tensors that a prepared call reads, and the tensors that it writes."""
        if kind == "broadcast" and options.rootRank == self.rank():
            return [x], []
        reads = [] if x is None or x is y else [x]
        return reads, [] if y is None else [y]

    def _submit(
        self, kind: str, plan: Plan, options: Options, name: str | None
    ) -> tuple[GroupWork, Call, Buffer]:
        """Submits a planned call. Returns the Work, and the Call and Buffer for prepare()."""
        call = Call(plan.op, name, self._set.process_set_id or 0, **plan.terms)
        kinds, inputs = describe(plan.inputs, in_place=False)
        outputs = [NOTHING if y is None else describe([y], True)[1][0] for y in plan.outputs]
        if call.op is Op.ALLREDUCE:
            check_apart(inputs)
        earlier = self._in_flight() if call.op is Op.BARRIER else ()
        # own=4 skips _submit(), _start_planned(), start() and the collective's method.
        numbers = submit(call, inputs or [NOTHING], outputs, own=4, alike=kind not in _UNLIKE)
        self._note(numbers)

        def collect(handles: Any) -> None:
            for number in earlier:  # includes calls whose Work object the caller has dropped
                wait_until((number,), None)
            received = []
            if call.op in (Op.ALLTOALL, Op.ALLGATHER) and plan.outputs[0] is None:
                rows = zip(kinds, handles, inputs, plan.inputs, strict=True)
                for k, number, buffer, x in rows:
                    memory, counts = take(number, buffer, k.stream(x))
                    received.append((k.wrap(memory, x), counts))
            plan.finish(received)

        seconds = self._timeout.total_seconds() if options.timeout is None else options.timeout
        handle = handle_of(numbers, inputs, plan.inputs, collect, self._text(kind), seconds)
        devices = {x.device for x in plan.results if x.device.type != "cpu"}
        # A call that a callback has made may end before the group's earlier calls.
        named = None, (self._set.process_set_id, name)
        futures, place = named if name else (self._futures, self._place())
        results, gpus = list(plan.results), sorted(devices, key=str)
        work = GroupWork(handle, results, futures, gpus, place, self.ranks)
        memory_in_use.add(work, plan.inputs, plan.writes())
        return work, call, (inputs or [NOTHING])[0]

    def _place(self) -> tuple[object, ...]:
        return self._set.process_set_id, self._calls % _PLACES

    def _text(self, kind: str) -> str:
        return f"{kind}, call {self._calls} in {self.label}"

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> GroupWork:
        """Starts to send a tensor to `destination`, a rank of the group.

        Reports an error to that rank.
        """
        return messages.send(tensors, destination, **self._terms("send", tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        """Starts to receive a tensor from `source`, a rank of the group.

        Reports an error to that rank.
        """
        return messages.receive(tensors, source, **self._terms("recv", tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Starts to receive a tensor from any rank. The work's source_rank() returns that rank."""
        return messages.receive(tensors, None, **self._terms("recv", tag))

    def _terms(self, kind: str, tag: int) -> dict[str, Any]:
        self._number_of_set(kind)
        seconds = self._timeout.total_seconds()
        return {"tag": tag, "name": self.label, "process_set": self._set, "timeout": seconds}

    def _number_of_set(self, kind: str) -> int:
        if self._set.process_set_id is None:
            raise ShutdownError(f"{kind}: {self.label} was destroyed, or farandole has shut down")
        return self._set.process_set_id

    def _note(self, numbers: Sequence[int]) -> None:
        """Remembers the handles of calls that were submitted."""
        self._numbers.extend(numbers)
        if len(self._numbers) > _MANY:
            self._in_flight()

    def _in_flight(self) -> list[int]:
        """Returns the handles of the group's unfinished calls, for which c10d's barrier waits."""
        if not self._numbers:
            return self._numbers
        self._numbers = sorted({number for number, _ in in_flight()}.intersection(self._numbers))
        return self._numbers

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose time-out error names every missing rank, whatever `wait_all_ranks` is.

        If `timeout` is 0, it raises at once if a rank is missing.
        """
        least = None if timeout is None else max(timeout, timedelta(microseconds=1))
        if (work := self.start("barrier", timeout=least)) is not None:
            work.wait()

    # ---- methods that c10d requires

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Creates a subgroup of `ranks`. Only these ranks need to call this. Others get None."""
        from farandole.c10d.world import split

        name = group_name or f"{self._name}:{ranks}"
        group: FarandoleGroup | None = split(self, ranks, name, timeout or self._timeout)
        if group is not None:
            group._set_group_name(name)
            group._set_group_desc(group_desc or "")
        return group

    def shutdown(self) -> None:
        """Ends this rank's part in the group. Unfinished calls continue."""
        self._end()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default time-out of later calls."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def getBackendName(self) -> str:
        """The backend's name, which init_process_group() takes."""
        return "farandole"

    name = _get_backend_name = getBackendName

    def get_group_store(self) -> Any:
        """c10d's store, which farandole does not use."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = [torch.device("cuda")] if torch.cuda.is_available() else []
        return [torch.device("cpu"), *cuda]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    @property
    def group_name(self) -> Any:
        """c10d's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """c10d's description of the group."""
        return self._description

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, because the core counts calls."""

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def __repr__(self) -> str:
        return f"<FarandoleGroup {self._name!r} of ranks {self.ranks}>"


def _options(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], Options]:
    """Splits the arguments into the first `count` arguments and the options.

    The options may be passed as c10d's options object or as separate values.
    """
    args, rest = args[:count], args[count:]
    given: Any = kwargs.pop("opts", None)
    if rest and hasattr(rest[0], "timeout"):
        given, rest = rest[0], ()
    options = Options(**dict(zip(names, rest, strict=False)))
    for name in names:
        setattr(options, name, kwargs.pop(name, getattr(options, name)))
    if given is not None:
        options.op = getattr(given, "reduceOp", options.op)
        options.root = getattr(given, "rootRank", options.root)
        options.timeout = given.timeout
    if isinstance(options.timeout, timedelta):
        seconds = options.timeout.total_seconds()
        options.timeout = seconds if seconds > 0 else None
    return (*args, *kwargs.values()), options


def _tensors(args: Any) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _end(members: ProcessSet, label: str, futures: Futures) -> None:
    futures.close()
    disband_process_set(members, f"end of {label}")
    memory_in_use.sweep()


def _method(kind: str) -> Callable[..., Work | None]:
    def method(self: FarandoleGroup, *args: Any, **kwargs: Any) -> Work | None:
        return self.start(kind, *args, **kwargs)

    method.__name__ = method.__qualname__ = kind
    return method


for _kind in PLANS:
    setattr(FarandoleGroup, _kind, _method(_kind))
