# SPDX-License-Identifier: Apache-2.0
"""The process group that torch.distributed's users call. Any thread may call it.

Its calls have no names: they are matched by their order in the group, which has its own process
set. torch asks for one order on all ranks, whichever threads call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from farandole._library import is_from_core
from farandole.arrays.buffers import Buffer, check_apart
from farandole.c10d import messages, under_way
from farandole.c10d.again import RepeatedPlan, form_of, repeated
from farandole.c10d.calls import PLANS, Options, Plan, Tensors, check_writable
from farandole.c10d.work import DoneWork, Futures, GroupWork
from farandole.calls import part
from farandole.calls.handles import OneHandle, take, wait_until
from farandole.calls.leases import in_flight
from farandole.calls.requests import NOTHING, Call, Op, is_told, refuse, submit, told
from farandole.errors import ShutdownError
from farandole.ops.starts import describe, handle_of
from farandole.process_sets import ProcessSet, disband_process_set
from farandole.torch.kind import check_unused
from farandole.torch.strides import write

__all__ = ["FarandoleGroup"]

_MANY = 1000  # numbers kept
_MOST_FORMS = 256  # prepared calls of one group
# Ranks use them in different ways, though each is made of a call in which all do the same.
_UNLIKE = ("gather", "reduce")
Uses = tuple[list[Any], list[Any]]


class FarandoleGroup(ProcessGroup):
    """A group of ranks. Its collectives are those of c10d, each by a row of PLANS."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(self, members: ProcessSet, label: str, timeout: timedelta, store: Any) -> None:
        """`members`: a set that this group alone uses; `label`: its name in errors."""
        self.ranks: list[int] = members.ranks or []
        place: Any = (members.rank(), len(self.ranks))  # an __init__ that has no stub
        super().__init__(*place)
        self.label = label
        self._set = members
        self._store = store
        self._timeout = timeout
        self._futures = Futures()
        self._calls = 0
        self._numbers: list[int] = []  # the core's, of calls that may be under way
        self._prepared: dict[Hashable, RepeatedPlan] = {}  # by form_of()
        self._name = self._description = ""
        self._end = weakref.finalize(self, _end, members, label, self._futures)
        self._end.atexit = False

    # ---- calls

    def start(self, kind: str, *args: Any, **kwargs: Any) -> Work:
        """Begins the collective of that name in c10d. An error is told to the others, too."""
        op, plan_of, names = PLANS[kind]
        number = self._number_of_set(kind)
        self._calls += 1
        if len(self._numbers) > _MANY:
            self._in_flight()
        form, x, y, given = form_of(kind, args, kwargs)
        try:
            known = self._prepared.get(form)
            if known and kind == "barrier" and self._numbers and self._in_flight():
                known = None  # it waits for them, too
            if known and (work := self._again(known, kind, x, y, given)) is not None:
                return work
            count = plan_of.__code__.co_argcount - 2
            args, options = _options(names, args, kwargs, count)
            under_way.wait_for_users(_tensors(args), ())  # a plan may copy them
            for tensor in _tensors(args):
                check_unused(tensor)
            plan = plan_of(self, *args, options)
            check_writable(plan)
            under_way.wait_for_users((), plan.writes())
            for tensor in plan.writes():  # perhaps from a copy
                check_unused(tensor, writes=True)
            work, call, buffer = self._submit(kind, plan, options)
            if form is not None and (
                again := repeated(kind, self.rank(), plan, call, buffer, x, y)
            ):
                if len(self._prepared) >= _MOST_FORMS:
                    self._prepared.clear()
                self._prepared[form] = again
            return work
        except Exception as reason:
            if not is_told(reason):
                refuse(Call(op, process_set=number), reason)
            raise told(reason) from reason.__cause__
        except BaseException as reason:
            part.end(reason)
            raise

    def _again(
        self, known: RepeatedPlan, kind: str, x: Tensor | None, y: Tensor | None, options: Any
    ) -> Work | None:
        """Submits a call as an equal one was prepared; None if a tensor has another layout."""
        waits = not getattr(options, "asyncOp", True)  # torch's caller waits at once
        if under_way.count():
            under_way.wait_for_users(*self._uses(kind, x, y, options))
        try:
            number = known.start(x, y, waits)
        except Exception as reason:
            if is_from_core(reason):  # the core has told the peers
                told(reason)
            raise
        if number is None or number == 0:
            return None if number is None else DoneWork([] if y is None else [y])
        self._numbers.append(number)
        seconds = options.timeout.total_seconds()
        seconds = seconds if seconds > 0 else self._timeout.total_seconds()
        results = [] if y is None else [y]
        handle = OneHandle(number, results, self._text(kind), seconds)
        work = GroupWork(handle, results, self._futures, [])
        # Also if the caller waits: that may time out.
        under_way.add(work, *self._uses(kind, x, y, options))
        return work

    def _uses(self, kind: str, x: Tensor | None, y: Tensor | None, options: Any) -> Uses:
        """The tensors that a repeated call reads, and those that it writes."""
        if kind == "broadcast" and options.rootRank == self.rank():
            return [x], []
        reads = [] if x is None or x is y else [x]
        return reads, [] if y is None else [y]

    def _submit(self, kind: str, plan: Plan, options: Options) -> tuple[GroupWork, Call, Buffer]:
        """Returns what repeated() needs, too."""
        call = Call(plan.op, process_set=self._set.process_set_id or 0, **plan.terms)
        kinds, inputs = describe(plan.inputs, in_place=False)
        outputs = [NOTHING if y is None else describe([y], True)[1][0] for y in plan.outputs]
        if call.op is Op.ALLREDUCE:
            check_apart(inputs)
        earlier = self._in_flight() if call.op is Op.BARRIER else ()
        # Called by start(), that by a method of c10d's name, and that by torch.
        numbers = submit(call, inputs or [NOTHING], outputs, own=3, alike=kind not in _UNLIKE)
        self._numbers.extend(numbers)

        def collect(handles: Any) -> None:
            for number in earlier:  # dropped ones, too
                wait_until((number,), None)
            received = []
            if call.op in (Op.ALLTOALL, Op.ALLGATHER) and plan.outputs[0] is None:
                rows = zip(kinds, handles, inputs, plan.inputs, strict=True)
                for k, number, buffer, x in rows:
                    memory, counts = take(number, buffer, k.stream(x))
                    received.append((k.wrap(memory, x), counts))
            write(plan.results, lambda: plan.finish(received))

        seconds = self._timeout.total_seconds() if options.timeout is None else options.timeout
        handle = handle_of(numbers, inputs, plan.inputs, collect, self._text(kind), seconds)
        devices = {x.device for x in plan.results if x.device.type != "cpu"}
        work = GroupWork(handle, list(plan.results), self._futures, sorted(devices, key=str))
        under_way.add(work, plan.inputs, plan.writes())
        return work, call, (inputs or [NOTHING])[0]

    def _text(self, kind: str) -> str:
        """The present call's, for errors."""
        return f"{kind}, call {self._calls} in {self.label}"

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> GroupWork:
        """Starts to send a tensor to that rank of the group; reports an error to the receiver."""
        return messages.send(tensors, destination, **self._terms("send", tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> GroupWork:
        """Starts to receive a tensor from that rank of the group; reports an error to the
        sender."""
        return messages.receive(tensors, source, **self._terms("recv", tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Starts to receive a tensor from any rank; the work's source_rank() tells which."""
        return messages.receive(tensors, None, **self._terms("recv", tag))

    def _terms(self, kind: str, tag: int) -> dict[str, Any]:
        self._number_of_set(kind)
        seconds = self._timeout.total_seconds()
        return {"tag": tag, "name": self.label, "process_set": self._set, "timeout": seconds}

    def _number_of_set(self, kind: str) -> int:
        if self._set.process_set_id is None:
            raise ShutdownError(f"{kind}: {self.label} was destroyed, or farandole has shut down")
        return self._set.process_set_id

    def _in_flight(self) -> list[int]:
        """The group's calls that have not ended; whatever becomes of them, c10d's barrier waits."""
        self._numbers = sorted({number for number, _ in in_flight()}.intersection(self._numbers))
        return self._numbers

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose time-out names every rank that is missing, whatever `wait_all_ranks`;
        one of 0 does not wait."""
        least = None if timeout is None else max(timeout, timedelta(microseconds=1))
        self.start("barrier", timeout=least).wait()

    # ---- what c10d asks of a group

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of these ranks of this one, made by them alone; None on others."""
        from farandole.c10d.world import split

        name = group_name or f"{self._name}:{ranks}"
        group: FarandoleGroup | None = split(self, ranks, name, timeout or self._timeout)
        if group is not None:
            group._set_group_name(name)
            group._set_group_desc(group_desc or "")
        return group

    def shutdown(self) -> None:
        """Ends this rank's part; what is under way goes on."""
        self._end()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls from now on."""
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
        """Nothing to do: the core counts."""

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def __repr__(self) -> str:
        return f"<FarandoleGroup {self._name!r} of ranks {self.ranks}>"


def _options(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], Options]:
    """`count` arguments of a call, and the rest as options: c10d's object, or one by one."""
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
    """All tensors among nested arguments."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _end(members: ProcessSet, label: str, futures: Futures) -> None:
    futures.close()
    disband_process_set(members, f"end of {label}")
    under_way.sweep()


def _method(kind: str) -> Callable[..., Work]:
    def method(self: FarandoleGroup, *args: Any, **kwargs: Any) -> Work:
        return self.start(kind, *args, **kwargs)

    method.__name__ = method.__qualname__ = kind
    return method


for _kind in PLANS:
    setattr(FarandoleGroup, _kind, _method(_kind))
