# SPDX-License-Identifier: Apache-2.0
"""Elastic training. A program commits its state, and a loop restores the state after a failure.

@farandole.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 10):
        ...
        state.commit()

Under `farandole run --elastic`, if a rank dies or hangs, the surviving ranks continue from the
newest commit in their memory (see farandole.worlds). Otherwise all ranks restart farandole
together, in the same processes. If a rank has died, that restart fails and raises the error. If
FARANDOLE_CHECKPOINT_DIR is set, commits are also written to the disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from farandole import ops, runtime, topology
from farandole.commits import NotSaved, Saved, Writer, read_commit
from farandole.config import setting
from farandole.errors import RETRIED, CheckpointError, HostsUpdatedInterrupt, PeerError
from farandole.handlers import Handlers, handler_of
from farandole.membership.messages import Commit, World
from farandole.objects import broadcast_object
from farandole.start import agent_client, leaving
from farandole.worlds import Worlds

__all__ = ["RETRIED", "ObjectState", "State", "run", "run_fn"]

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="State")

_REMOVED, _ADDED = 1, 2  # bits of the argument update_res of on_hosts_updated()
_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0.0)  # seconds to wait after each attempt to find a commit


class State(ABC):
    """The values from which training continues. After sync(), they are equal on all ranks. Methods
    other than on_hosts_updated() may be called only from the training thread."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        # The updates noted by on_hosts_updated(). No lock guards them, because a signal handler may
        # call that method while its thread is in another method.
        self._updates: list[int] = []
        self._commits = 0  # number of the last commit, or negative if this rank has none

    @property
    def world(self) -> int:
        """Number of the present world. It starts at 1, and each restart adds 1."""
        return runtime.world()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Registers functions to call, in this order, after each restart of the runtime."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets this state, then calls the callbacks. Called after each restart of the runtime."""
        self._updates.clear()
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float = 0.0, update_res: int = _ADDED) -> None:
        """Notes that hosts were removed (1), added (2) or both (3). Any thread and any signal
        handler may call this."""
        self._updates.append(int(update_res))

    def commit(self) -> None:
        """Saves a copy in memory, then calls check_host_updates(). Collective. In a function that
        run() decorates, also writes the copy to FARANDOLE_CHECKPOINT_DIR if that is set and a write
        is due."""
        self._keep()
        self.check_host_updates()

    def _keep(self) -> None:
        self.save()
        self._commits += 1
        if _call is not None and _call.worlds is not None:
            _call.worlds.agent.committed()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if any rank has noted an update or must leave.
        A rank must leave after a signal or if `farandole run --elastic` says so. Collective."""
        updates = reduce(or_, self._updates, 0)
        call = _call
        worlds = call.worlds if call is not None else None
        signalled = agent_client.was_signalled()
        noted = np.array(
            [
                updates & _REMOVED,
                updates & _ADDED or (worlds is not None and worlds.agent.meets),
                worlds.agent.leaves + worlds.agent.lost if worlds is not None else signalled,
                signalled,
                call is not None and call.wants_to_write(),
            ],
            np.uint8,
        )
        ops.allreduce_(noted, op=ops.Max, name="farandole.elastic.hosts")
        removed, added, all_leave, some_leave, due = (bool(flag) for flag in noted)
        if noted[:4].any():
            self._keep()
        if call is not None and (due or all_leave or some_leave):
            call.write(self, at_once=all_leave or some_leave)
        if worlds is not None:
            # Stays True even if the supervisor answers again, so that all ranks leave the same way.
            worlds.agent.leaves_lost |= bool(noted[2] > 1)
        if noted[:4].any():
            # Checks for signals again. A preempted host signals its ranks one by one, so more
            # signals may have arrived during the write.
            leaving = all_leave or (some_leave and agent_client.was_signalled())
            skip = removed and not (added or some_leave)
            raise HostsUpdatedInterrupt(skip_sync=skip, leaving=leaving)

    def write(self, folder: Path) -> None:
        """Writes the last copy to `folder` atomically. Collective."""
        raise TypeError(
            f"{type(self).__name__} can't be written to FARANDOLE_CHECKPOINT_DIR: derive it from "
            "ObjectState or TorchState, or give it write() and read()"
        )

    def read(self, folder: Path) -> bool:
        """Restores the commit that write() wrote to `folder`, at least on rank 0. Collective.

        Returns True on all ranks if there was a commit.
        """
        return False

    def reset(self) -> None:  # noqa: B027
        """Adapts everything that depends on the number of ranks."""

    @abstractmethod
    def save(self) -> None:
        """Keeps a copy of the state in this process's memory."""

    @abstractmethod
    def restore(self) -> None:
        """Restores the last copy."""

    @abstractmethod
    def sync(self) -> None:
        """Copies rank 0's state to all ranks, then saves it. Collective."""


class ObjectState(State):
    """A state whose attributes can be copied and pickled, such as ObjectState(epoch=0, batch=0).

    Objects that have state_dict() and load_state_dict(), such as schedulers, are never replaced.
    Only their states are saved and restored, even if the objects are nested in containers or in
    other objects. Every rank must create these objects before training.

    Files in FARANDOLE_CHECKPOINT_DIR contain no pickles. write() accepts objects that have
    state_dict(), numbers, strings, bytes, None, NumPy and JAX arrays, PyTorch tensors, and dicts,
    lists, sets, tuples and named tuples of these.
    """

    if TYPE_CHECKING:  # the program chooses the names of the attributes

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self._handlers = Handlers()
        for name, value in attributes.items():
            setattr(self, name, value)
        self._saved = self._handlers.save(attributes)
        self._names = tuple(attributes)

    def save(self) -> None:
        """Keeps a copy of the attributes in this process's memory."""
        self._saved = self._handlers.save(self._attributes())

    def restore(self) -> None:
        """Sets the attributes to the values in the last copy."""
        self._assign(self._handlers.restore(self._saved))

    def sync(self) -> None:
        """Copies rank 0's attributes to all ranks, then saves them. Collective."""
        values = self._handlers.sync(self._attributes())
        self._assign(values)
        self._saved = self._handlers.copy(values)

    def reset(self) -> None:
        """Adapts samplers and other objects to the number of ranks."""
        self._handlers.reset()

    def write(self, folder: Path) -> None:
        """Writes rank 0's last copy to `folder` atomically. Collective.

        All ranks raise CheckpointError if another user may write to the folder or the disk fails.
        All ranks raise TypeError if the file can't hold an attribute without pickling.
        """
        writer = Writer(folder)
        _by_rank_0(lambda: writer.write(self.saved(), self._number()), "write")

    def _number(self) -> Commit:
        return Commit(runtime.world(), self._commits)

    def read(self, folder: Path) -> bool:
        """Restores the commit that write() wrote to `folder`, on rank 0 only. Collective. Call
        sync() afterwards.

        Returns True on all ranks if there was a commit. All ranks raise CheckpointError if the file
        is damaged, or if another user owns it or may write to it.
        """
        there, found = _by_rank_0(lambda: read_commit(folder, self.saved()), "read")
        if found is not None:
            self.restore_from(found)
        return there

    def saved(self) -> Saved:
        """Returns the last copy, which is the one that write() writes."""
        return self._saved

    def restore_from(self, saved: Saved) -> None:
        """Restores a copy from saved(). Attributes missing from it get the last copy's values."""
        last = self._saved
        self._saved = Saved({**last.values, **saved.values}, {**last.parts, **saved.parts})
        self.restore()

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _assign(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            super().__setattr__(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. If `value` has a state, saves that state at once, as Horovod does."""
        super().__setattr__(name, value)
        if name in self.__dict__.get("_names", ()) and handler_of(value) is not None:
            self._saved = self._handlers.save({**self._saved.values, name: value}, only=value)


def _by_rank_0(work: Callable[[], T | None], what: str) -> tuple[bool, T | None]:
    """Calls `work` on rank 0. Collective. Raises rank 0's errors on all ranks.

    Returns a pair. Its first item is True on all ranks if `work` returned a result. Its second item
    is that result on rank 0 and None on other ranks.
    """
    result: T | None = None
    error: Exception | None = None
    if topology.rank() == 0:
        try:
            result = work()
        except (CheckpointError, TypeError, ValueError) as reason:
            error = reason
    name = f"farandole.elastic.{what}"
    outcome = np.array([error is not None, result is not None], np.uint8)
    ops.broadcast_(outcome, 0, name=name)
    if outcome[0]:
        heard: Any = broadcast_object((type(error), str(error)), 0, name=f"{name}.error")
        raise error or heard[0](heard[1])
    return bool(outcome[1]), result


class _TrainingCall:
    def __init__(self, number: int, worlds: Worlds | None) -> None:
        self.number, self.worlds = number, worlds
        name = setting("FARANDOLE_CHECKPOINT_DIR")
        self.folder = Path(name) / f"call-{number}" if name else None
        # Under `farandole run --elastic`, the folder exists already.
        self._writer = Writer(self.folder, make=worlds is None) if self.folder else None
        self._seconds = float(setting("FARANDOLE_CHECKPOINT_SECONDS"))
        # Time of the last write. The first commit is written at once in order to test the disk.
        self._written = float("-inf")
        # True if the disk may hold a commit that has not been read yet. In the first call under
        # `farandole run --elastic`, the supervisor tells the rank whether there is one.
        self.unread = self.folder is not None and (worlds is None or number > 1)

    def signals(self, grace: float) -> contextlib.AbstractContextManager[None]:
        """Context manager in which preemption signals make this rank leave if another place keeps
        its state."""
        return agent_client.leaving_on_signals(grace if self.folder or self.worlds else None)

    def wants_to_write(self) -> bool:
        """Returns True on rank 0 if a write is due."""
        if self._writer is None or topology.rank() != 0:
            return False
        return time.monotonic() >= self._written + self._seconds

    def write(self, state: State, at_once: bool = False) -> None:
        """Writes the newest commit. Collective. If `at_once`, waits until it is written."""
        if self.folder is None or self._writer is None:
            return
        first, self._written = self._written < 0, time.monotonic()
        if not isinstance(state, ObjectState):
            state.write(self.folder)
            return
        now = at_once or first or not self._seconds
        write = partial(self._save, last=at_once) if now else self._writer.begin
        _by_rank_0(lambda: write(state.saved(), state._number()), "write")

    def _save(self, saved: Saved, commit: Commit, last: bool) -> None:
        """Writes this commit. If the disk fails, training continues nevertheless."""
        assert self._writer is not None
        self._writer.join()
        try:
            self._writer.write(saved, commit, last)
        except NotSaved as reason:
            if last:
                text = f"farandole: the last commit, {commit.number}, is not saved: {reason}\n"
                os.write(2, text.encode(errors="replace"))

    def end(self, state: State) -> None:
        """Writes the last commit on rank 0, unless that commit is already on the disk."""
        if self._writer is not None and topology.rank() == 0 and isinstance(state, ObjectState):
            self._save(state.saved(), state._number(), last=True)

    def read(self, state: State) -> None:
        """Restores the commit on the disk if any rank needs it. Collective."""
        if self.folder is None:
            return
        wanted = np.array([self.unread or self.start.from_disk], np.uint8)
        ops.allreduce_(wanted, op=ops.Max, name="farandole.elastic.unread")
        found = bool(wanted[0]) and state.read(self.folder)
        if self.start.from_disk and self.number == 1 and isinstance(state, ObjectState):
            for wait in _WAITS:  # the folder may be missing for a moment
                if found:
                    break
                time.sleep(wait)
                found = state.read(self.folder)
            else:
                raise CheckpointError(
                    f"all ranks must start from commit {self.start.start.number}, which is not in "
                    f"{self.folder}; remedy: restore that folder, then start again"
                )
        if found:
            state.on_reset()
        self.unread = False

    @property
    def start(self) -> World:
        """The present world, including the commit from which it starts."""
        return self.worlds.start if self.worlds is not None else World()


_call: _TrainingCall | None = None  # the call under way
_calls = 0  # number of calls so far; each call has its own folder


@contextlib.contextmanager
def _new_call(in_place: bool) -> Iterator[_TrainingCall]:
    """Context manager for one call of a decorated function. `in_place` is True if the world may
    change while its processes go on."""
    global _call, _calls
    before = _call
    _calls += 1
    _call = _TrainingCall(_calls, Worlds.of_job() if in_place else None)
    try:
        yield _call
    finally:
        _call = before


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], None] = runtime.restart
) -> Callable[Concatenate[S, P], R]:
    """Wraps `func` so that state.sync() and `func(state, ...)` are called again after each failure.

    After an error in RETRIED, the state is restored from the last commit. After
    HostsUpdatedInterrupt, the state is kept. Then `reset` is called, which restarts the runtime.
    Under `farandole run --elastic`, the ranks instead join the next world, which does not contain
    the dead ranks and may contain new ones. All other errors, including those of `reset`, are
    raised on this rank. The other ranks then raise a PeerError that quotes the error, and do not
    restart.

    If FARANDOLE_CHECKPOINT_DIR is set, state.on_reset() is called and training starts from the last
    commit in that folder. Each call of the decorated function keeps its own commits. If the folder
    is set and any rank gets SIGTERM or SIGUSR1, all ranks leave at the same commit() or
    check_host_updates(). The state is then written, and the program ends by SystemExit(0). Under
    `farandole run --elastic`, only the rank that got the signal leaves, but the supervisor can make
    all ranks leave.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        grace = float(setting("FARANDOLE_GRACE"))
        try:
            with _new_call(reset is runtime.restart) as call, call.signals(grace):
                result = attempts(state, call, *args, **kwargs)
        except BaseException as error:
            runtime.end_training(leaving.describe(error))
            raise
        runtime.end_training("its elastic training has ended normally")
        return result

    def attempts(state: S, call: _TrainingCall, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync = False
        if call.worlds is not None and call.worlds.begin():
            state._commits = -1  # no commit yet
            state.on_reset()
        while True:
            error: BaseException | None = None
            try:
                call.read(state)
                if not skip_sync:
                    _sync(state, call)
                result = func(state, *args, **kwargs)
                call.end(state)
                if call.worlds is None or call.worlds.ended():
                    return result
                error = PeerError("a rank was lost after this one had finished")
                state.restore()
            except RETRIED as reason:
                error = reason
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                if interrupt.leaving:
                    if call.worlds is not None and call.worlds.agent.leaves_lost:
                        call.worlds.leave(None)  # first, so that no rank's error reaches the others
                    agent_client.leave_job()
                skip_sync = interrupt.skip_sync
            if call.worlds is None:
                reset()
            else:
                call.worlds.go_on(error)
                skip_sync = False  # there may be new ranks
            state.on_reset()

    return wrapper  # type: ignore[return-value]  # callers may also pass `state` by keyword


def _sync(state: State, call: _TrainingCall) -> None:
    """Copies rank 0's state to this rank. If this fails, restores or discards this rank's state."""
    before = state.saved() if isinstance(state, ObjectState) else None
    try:
        state.sync()
    except BaseException:
        if before is not None and isinstance(state, ObjectState):
            state.restore_from(before)
        elif topology.rank() != 0:
            state._commits = -1  # the state is now a mixture of two commits
            if call.worlds is not None:
                call.worlds.agent.forget()
        raise
    state._commits = call.start.start.number
    if call.worlds is not None:
        call.worlds.agent.synchronized()


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a training function whose first argument is a State, so that it survives failures.

    Returns a function that takes the same arguments and returns the same result as `func`. The
    function calls state.sync(), then `func(state, ...)`. After PeerError, StallError or
    LibraryError it restores the last commit. After a change of hosts it keeps the state. Then it
    restarts the runtime with the present ranks and calls `func` again. It raises all other errors.
    """
    return run_fn(func)
