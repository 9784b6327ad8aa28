# SPDX-License-Identifier: Apache-2.0
"""Elastic training: a state that is committed, and a loop that restores it after a failure.

@farandole.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 10):
        ...
        state.commit()

Under `mpirun --with-ft ulfm` the ranks that live go on when one has died, from the newest commit in
their memory (farandole.worlds). Else the restart fails and the error is raised; `farandole run
--elastic` then starts all ranks anew, and they go on from the last commit on the disk
(FARANDOLE_CHECKPOINT_DIR).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np

from farandole import ops, runtime, topology
from farandole.commits import read_commit, write_commit
from farandole.config import setting
from farandole.errors import RETRIED, CheckpointError, HostsUpdatedInterrupt
from farandole.objects import broadcast_object
from farandole.start import joining, leaving, supervised
from farandole.worlds import Worlds

__all__ = ["RETRIED", "ObjectState", "State", "run", "run_fn"]

R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="State")

_REMOVED, _ADDED = 1, 2  # bits of on_hosts_updated's update_res


class State(ABC):
    """What training needs to continue; equal on all ranks after sync()."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._updates = 0
        self._commits = 0  # the number of the last one; less than 0: this rank has no state

    @property
    def world(self) -> int:
        """The number of the present world: 1 at first, one more after each restart."""
        return runtime.world()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Registers functions that are called, in order, after each restart of the runtime."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after a restart of the runtime: resets this state, then calls the callbacks."""
        with self._lock:
            self._updates = 0
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float = 0.0, update_res: int = _ADDED) -> None:
        """Notes that hosts were removed (1), added (2) or both (3); any thread may call this."""
        with self._lock:
            self._updates |= int(update_res)

    def commit(self) -> None:
        """Saves, checks for host updates, and, in a function that run() has decorated, writes to
        FARANDOLE_CHECKPOINT_DIR if that is set; collective."""
        self.save()
        self._commits += 1
        self.check_host_updates()
        if _folder is not None:
            self._keep(_folder)

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if any has noted an update, or shall leave
        because of its supervisor or a signal; collective."""
        with self._lock:
            updates = self._updates
        leaves = supervised.shall_leave()
        # A rank that joins begins with the program's first call.
        added = updates & _ADDED or (_worlds is not None and _calls == 1 and _worlds.tend())
        noted = np.array([updates & _REMOVED, added, leaves], np.uint8)
        ops.allreduce_(noted, op=ops.Max, name="farandole.elastic.hosts")
        if noted.any():
            raise HostsUpdatedInterrupt(skip_sync=not noted[1], leaving=bool(noted[2]))

    def _keep(self, folder: Path) -> None:
        """Writes, and lets the supervisor know of the progress."""
        self.write(folder)
        if topology.rank() == 0:
            supervised.tell_commit()

    def write(self, folder: Path) -> None:
        """Writes what was saved last to `folder`, as a whole or not at all; collective."""
        raise TypeError(
            f"{type(self).__name__} can't be written to FARANDOLE_CHECKPOINT_DIR: derive it from "
            "ObjectState or TorchState, or give it write() and read()"
        )

    def read(self, folder: Path) -> bool:
        """Restores, at least on rank 0, what write() has left in `folder`; collective.

        Returns on all ranks whether there was anything.
        """
        return False

    def reset(self) -> None:  # noqa: B027
        """Adapts whatever depends on the number of ranks."""

    @abstractmethod
    def save(self) -> None:
        """Keeps a copy of the state in this process's memory."""

    @abstractmethod
    def restore(self) -> None:
        """Restores the last copy."""

    @abstractmethod
    def sync(self) -> None:
        """Copies rank 0's state to all ranks, and saves; collective."""


class ObjectState(State):
    """Attributes of any type that can be copied and pickled: ObjectState(epoch=0, batch=0).

    In FARANDOLE_CHECKPOINT_DIR nothing is pickled: write() takes numbers, texts, bytes, None,
    arrays of NumPy and JAX, tensors of PyTorch, and dicts, lists, sets and (named) tuples of these.
    """

    if TYPE_CHECKING:  # attributes have the names that the program gives them

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self._names = tuple(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(attributes)

    def save(self) -> None:
        """As in State."""
        self._saved = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """As in State."""
        self._assign(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """As in State."""
        self._assign(broadcast_object(self._attributes(), 0, name="farandole.elastic.objects"))
        ObjectState.save(self)

    def write(self, folder: Path) -> None:
        """As in State; by rank 0. Raises on all ranks CheckpointError for a folder that another
        user may write to, and where the disk fails; TypeError for an attribute that no file without
        code can hold."""
        _by_rank_0(lambda: write_commit(folder, self.saved(), topology.size()), "write")

    def read(self, folder: Path) -> bool:
        """As in State; on rank 0, whose state sync() copies. Raises on all ranks CheckpointError
        for what another user owns or may write to, and for a file that is damaged."""
        there, found = _by_rank_0(lambda: read_commit(folder, self.saved()), "read")
        if found is not None:
            self.restore_from(found)
        return there

    def saved(self) -> dict[str, Any]:
        """What write() puts on the disk: the last copy."""
        return self._saved

    def restore_from(self, saved: dict[str, Any]) -> None:
        """Restores what saved() has returned; attributes that it lacks stay."""
        self._saved = {**self._saved, **saved}
        self.restore()

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _assign(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def _by_rank_0(work: Callable[[], T | None], what: str) -> tuple[bool, T | None]:
    """Whether `work` has returned anything on rank 0, and there what; collective.

    Its errors are raised on all ranks.
    """
    result: T | None = None
    error: Exception | None = None
    if topology.rank() == 0:
        try:
            result = work()
        except (CheckpointError, TypeError, ValueError) as reason:
            error = reason
    name = f"farandole.elastic.{what}"
    told = np.array([error is not None, result is not None], np.uint8)
    ops.broadcast_(told, 0, name=name)
    if told[0]:
        heard: Any = broadcast_object((type(error), str(error)), 0, name=f"{name}.error")
        raise error or heard[0](heard[1])
    return bool(told[1]), result


_worlds: Worlds | None = None  # of the call under way; None: a dead rank ends the job
_folder: Path | None = None  # where the commits of the call under way are written; None: nowhere
_calls = 0  # of functions decorated with run(): each has a folder of its own


@contextlib.contextmanager
def _folder_of_call() -> Iterator[Path | None]:
    """A context in which commits are written, if the setting says so."""
    global _folder, _calls
    before, name = _folder, setting("FARANDOLE_CHECKPOINT_DIR")
    _calls += 1
    _folder = Path(name) / f"call-{_calls}" if name else None
    try:
        yield _folder
    finally:
        _folder = before


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], None] = runtime.restart
) -> Callable[Concatenate[S, P], R]:
    """Calls `func(state, ...)` in a loop: state.sync() comes first, and again after each failure.

    After an error in RETRIED the last commit is restored, after HostsUpdatedInterrupt the state
    stays. Then `reset` is called, which restarts the runtime, under ULFM without the ranks that
    have died and with new ones up to FARANDOLE_MAX_NP; its own error ends the loop. Any other error
    is raised and ends training on the other ranks too: they get a PeerError with it, and do not
    restart.

    If FARANDOLE_CHECKPOINT_DIR is set, training goes on from the last commit there, after a call of
    state.on_reset(). Each call in a program has its own commits, by its place in the order. Then
    SIGTERM and SIGUSR1 on any rank, and `farandole run --elastic`, make all ranks leave at the same
    commit() or check_host_updates(): the state is written, and the program ends by SystemExit(0).
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        grace = float(setting("FARANDOLE_GRACE"))
        in_place = reset is runtime.restart
        try:
            with (
                _folder_of_call() as folder,
                supervised.signals(grace if folder else None),
                _worlds_of_call() if in_place else contextlib.nullcontext() as worlds,
            ):
                result = attempts(state, folder, worlds, *args, **kwargs)
        except BaseException as error:
            runtime.end_training(leaving.describe(error))
            raise
        runtime.end_training("its elastic training has ended normally")
        return result

    def attempts(
        state: S, folder: Path | None, worlds: Worlds | None, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        skip_sync = finished = False
        unread = folder
        commits = 0
        if joining.joins() and worlds is not None:
            commits, unread = _join(state, worlds), None
        while True:
            try:
                if unread and state.read(unread):
                    state.on_reset()
                unread = None
                if not skip_sync:
                    _sync(state, commits)
                result = func(state, *args, **kwargs)
                if worlds is None:
                    return result
                finished = True
            except RETRIED:
                state.restore()
                skip_sync = finished = False
            except HostsUpdatedInterrupt as interrupt:
                if interrupt.leaving:
                    _leave(state, folder)
                skip_sync, finished = interrupt.skip_sync, False
            if worlds is None:
                reset()
            else:
                found = worlds.go_on(state._commits, finished)
                if found.finished:
                    return result
                if finished:
                    state.restore()
                commits, skip_sync = found.commits, False  # there may be new ranks
            state.on_reset()

    return wrapper  # type: ignore[return-value]  # callers may also name the state


@contextlib.contextmanager
def _worlds_of_call() -> Iterator[Worlds | None]:
    """A context in which ranks outlive the death of another, if MPI lets them."""
    global _worlds
    before, _worlds = _worlds, Worlds.of_job()
    try:
        yield _worlds
    except BaseException as error:
        if _worlds is not None:
            _worlds.leave(leaving.describe(error))
        raise
    finally:
        if _worlds is not None:
            _worlds.close()
        _worlds = before


def _join(state: State, worlds: Worlds) -> int:
    """Makes this process a rank of the job that has started it; returns its commit's number."""
    try:
        found = worlds.join()
    except joining.Away as reason:
        print(f"farandole: a process that was to join ends: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(0) from reason
    state._commits = -1
    state.on_reset()
    return found.commits


def _sync(state: State, commits: int) -> None:
    """Gives this rank the state of rank 0, whole or not at all; its number is `commits`."""
    before = state.saved() if isinstance(state, ObjectState) else None
    try:
        state.sync()
    except BaseException:
        if before is not None and isinstance(state, ObjectState):
            state.restore_from(before)
        elif topology.rank() != 0:
            state._commits = -1  # parts of it may be of another commit
        raise
    state._commits = commits


def _leave(state: State, folder: Path | None) -> NoReturn:
    """Ends this process, and with it the job, so that another one can go on from here."""
    if folder:
        state.save()
        state._keep(folder)
    supervised.note_leaving()
    raise SystemExit(0)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorates a training function whose first argument is a State; see run_fn."""
    return run_fn(func)
