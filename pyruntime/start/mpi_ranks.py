# SPDX-License-Identifier: Apache-2.0
"""The bootstrap of an MPI job, through mpi4py. It runs on the thread that calls init().

A thread `farandole.init` creates the communicator for a list of ranks.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from farandole._library import check_count, ffi, lib
from farandole.config import home_for_mpi
from farandole.errors import FarandoleError, LibraryError
from farandole.start import leaving, limits, siblings
from farandole.start.bootstrap import GRACE, REMEDY, Bootstrap, Goodbye, Goodbyes
from farandole.start.mpi_waits import LONGEST_PAUSE, Notes, Wait
from farandole.start.secret import job_secret
from farandole.trust import safe_working_folder

_finalizes = False  # True if this module, rather than mpi4py or the user, finalises MPI
_LAST_GRACE = 30.0  # seconds for which exit waits for ranks that may be unreachable


class Mpi(Bootstrap):
    """Bootstrap on a private duplicate of the user's communicator."""

    _keyval: int | None = None
    _awaited: Callable[[], object] | None = None  # returns true once MPI_Finalize cannot hang
    _grace = 0.0  # number of seconds for which exit waits until _awaited() is true
    # Requests whose waits may end early. MPI may still read and write their memory.
    _unended: ClassVar[list[Any]] = []
    # Number of duplications by members. The key None stands for the world.
    _begun: ClassVar[Counter[object]] = Counter()
    _unfinished: tuple[Any, Any] | None = None  # a duplication that some ranks have not joined

    def __init__(self, mpi: Any, comm: Any, goodbyes: Goodbyes | None, seconds: float) -> None:
        """`comm` is an mpi4py communicator, a list of world ranks, or None for the world.

        Raises ValueError on ranks that are not in the list. This is a collective of the members.
        """
        self.mpi = mpi
        self.seconds = seconds
        members = _members(mpi, comm)
        base = comm if isinstance(comm, mpi.Comm) else mpi.COMM_WORLD
        key = None if members is None else tuple(members)
        everyone = range(base.Get_size()) if members is None else members
        # Only bootstraps on the world have a number, as the user may free other communicators.
        number = (key, Mpi._begun[key]) if base is mpi.COMM_WORLD else None
        check = _check(mpi, goodbyes, base, everyone)
        self._wait = Wait(Notes(mpi, base, everyone, number), seconds, check)
        try:
            check()
            self._comm = self._duplicate(base, members)
            Mpi._begun[key] += base is mpi.COMM_WORLD
            self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
            notes = Notes(mpi, self._comm, range(self.size), None)
            self._wait = Wait(notes, seconds)
            self._introduce(mpi.Get_processor_name(), _secret())
        except mpi.Exception as reason:
            raise _failed(reason) from reason
        except BaseException as reason:
            self.abandon(reason)
            raise

    def _duplicate(self, base: Any, members: list[int] | None) -> Any:
        if members is not None:
            return self._group(base, members)
        ours = base is self.mpi.COMM_WORLD
        if ours and Mpi._unfinished is not None:
            made, request = Mpi._unfinished
        else:
            made, request = base.Idup()
        if ours:
            Mpi._unfinished = made, request
        self._end(request)
        Mpi._unfinished = None if ours else Mpi._unfinished
        return made

    def _group(self, base: Any, members: list[int]) -> Any:
        """Creates the group's communicator in a thread, as MPI has no nonblocking call for this."""
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
        """Stores the test of a request that must end, because MPI_Finalize would wait for it."""
        Mpi._awaited, Mpi._grace = done, GRACE

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """Returns the data of every rank, in rank order. This is a collective."""
        try:
            return self._allgather(data, seconds)
        except self.mpi.Exception as reason:
            raise _failed(reason) from reason

    def _allgather(self, data: bytes, seconds: float | None) -> list[bytes]:
        counts = np.zeros(self.size, np.int64)
        self._end(self._comm.Iallgather(np.array([len(data)], np.int64), counts), seconds)
        starts = np.concatenate([[0], np.cumsum(counts)])
        received = bytearray(int(starts[-1]))
        layout = [received, (counts, starts[:-1]), self.mpi.BYTE]
        self._end(self._comm.Iallgatherv([data, self.mpi.BYTE], layout), seconds)
        return [bytes(received[a:b]) for a, b in itertools.pairwise(starts)]

    def _end(self, request: Any, seconds: float | None = None) -> None:
        self._must_end(request.Test)
        try:
            self._wait.until(request.Test, seconds)
        except BaseException:
            self._keep(request)
            raise

    @classmethod
    def _keep(cls, request: Any) -> None:
        """Keeps a request, and with it its memory, until MPI has completed the request."""
        cls._unended.append(request)
        with contextlib.suppress(Exception):  # MPI has noticed the death of a rank
            cls._unended[:] = [each for each in cls._unended if not each.Test()]

    def world_ranks(self, comm: Any) -> list[int]:
        """Returns this world's ranks that are in an mpi4py communicator, in ascending order.

        Raises ValueError if the communicator has processes that are not in this world.
        """
        ranks = self.mpi.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group())
        if self.mpi.UNDEFINED in ranks:
            raise ValueError("the communicator holds processes that are not in farandole's world")
        return sorted(ranks)

    def comm_address(self) -> int:
        """Returns the address of these ranks' MPI_Comm, for messages between hosts."""
        return int(self.mpi._addressof(self._comm))

    def threads_supported(self) -> bool:
        """Returns True if several threads may call MPI at once."""
        return bool(self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE)

    def on_finalize(self, leave: Callable[[], object]) -> None:
        """Registers a function that is called when the user finalises MPI."""
        # MPI_Finalize first frees COMM_SELF, which calls the delete functions of its attributes.
        mpi = self.mpi
        if Mpi._keyval is None:
            Mpi._keyval = mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: value())
        if mpi.COMM_SELF.Get_attr(Mpi._keyval) is None:
            mpi.COMM_SELF.Set_attr(Mpi._keyval, leave)

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Waits at most GRACE until all ranks leave, because MPI_Finalize would wait forever.

        If this rank has failed and other ranks continue, aborts MPI's job. If the job is broken and
        other ranks do not leave, they may be unreachable. end_stranded() then handles this.
        """
        if self.mpi.Is_finalized():
            return Goodbyes(goodbye, lambda: None)
        group = self._comm.Get_group()
        said = bytearray(Goodbye.BYTES * self.size)

        try:
            everyone = self._comm.Iallgather(goodbye.encode(), said)
            self._keep(everyone)
            if _completes(everyone.Test, GRACE):
                self._comm.Free()
            elif failed:
                abort(self.mpi, self.rank)
            elif broken:
                Mpi._awaited, Mpi._grace = everyone.Test, _LAST_GRACE
        except self.mpi.Exception:  # a rank has died, so the communicator is not freed
            return _MpiGoodbyes(goodbye, lambda: None, group)

        def received_all() -> list[Goodbye] | None:
            with contextlib.suppress(self.mpi.Exception):
                if everyone.Test():
                    parts = range(0, len(said), Goodbye.BYTES)
                    return [Goodbye.decode(bytes(said[at : at + Goodbye.BYTES])) for at in parts]
            return None

        return _MpiGoodbyes(goodbye, received_all, group)

    def abandon(self, reason: BaseException) -> None:
        """Tells the waiting ranks why this rank's init() fails."""
        if not self._wait.reported:
            with contextlib.suppress(self.mpi.Exception):
                self._wait.notes.tell("failed", leaving.describe(reason))
        self._wait.reported = True

    @classmethod
    def end_stranded(cls, mpi: Any, owner: int) -> None:
        """Aborts MPI's job if MPI_Finalize would hang. Called at exit."""
        if os.getpid() != owner or mpi.Is_finalized():
            return
        stranded = False
        if cls._awaited is not None:
            with contextlib.suppress(mpi.Exception):  # a rank has died, and MPI has noticed
                stranded = not _completes(cls._awaited, cls._grace)
        if stranded:
            abort(mpi, mpi.COMM_WORLD.Get_rank())


class _MpiGoodbyes(Goodbyes):
    """Goodbyes that know the ranks' MPI group, because the next world may have fewer ranks."""

    def __init__(
        self, own: Goodbye, received_all: Callable[[], list[Goodbye] | None], group: Any
    ) -> None:
        super().__init__(own, received_all)
        self.group = group


def _secret() -> bytes:
    """Returns the job's secret, or b"" if there is none.

    Without a secret, anybody who reads MPI's messages can derive keys.
    """
    # Ignores errors, because the secret is optional with MPI, and the core later refuses wrong
    # settings.
    with contextlib.suppress(LibraryError, ValueError):
        return job_secret()
    return b""


def _check(
    mpi: Any, goodbyes: Goodbyes | None, base: Any, members: Iterable[int]
) -> Callable[[], None]:
    """Returns a function that raises PeerError if a member has announced that it will not come."""
    if not isinstance(goodbyes, _MpiGoodbyes):
        return lambda: None
    places = mpi.Group.Translate_ranks(goodbyes.group, None, base.Get_group())
    wanted = set(members)
    known = goodbyes
    return lambda: known.check(lambda rank: places[rank] in wanted)


def _failed(reason: BaseException) -> FarandoleError:
    return LibraryError(
        f"init(): MPI failed while the ranks met: {reason}; a rank that has died does not come "
        "back: see the output of the others, and restart the job"
    )


def _completes(done: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(LONGEST_PAUSE)
    return True


def _members(mpi: Any, comm: Any) -> list[int] | None:
    """Returns the sorted ranks of a list, or None for the world and for communicators."""
    world = mpi.COMM_WORLD
    if comm is None or isinstance(comm, mpi.Comm) or (isinstance(comm, Sequence) and not comm):
        return None
    ranks = sorted(comm)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world.Get_size() for rank in ranks):
        raise ValueError(f"init(comm={ranks}): pass distinct ranks, 0 to {world.Get_size() - 1}")
    if world.Get_rank() not in ranks:
        raise ValueError(
            f"rank {world.Get_rank()} is not in init(comm={ranks}), so it must not call farandole"
        )
    return ranks


def abort(mpi: Any, rank: int) -> None:
    """Aborts MPI's job, and prints why."""
    print(
        f"farandole: rank {rank} has failed and other ranks do not end: ending the job",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    mpi.COMM_WORLD.Abort(1)


def load(promised: int, seconds: float) -> Any:
    """Initialises MPI and returns mpi4py's MPI.

    MPI_Init waits for `promised` ranks. After `seconds`, the core's watchdog ends the process and
    prints an error. Raises LibraryError, PeerError if a rank has ended, and ImportError if there is
    no MPI.
    """
    global _finalizes
    loaded = "mpi4py.MPI" in sys.modules
    limits.check_files()
    try:
        import mpi4py

        # mpi4py would finalise MPI even in forked children, which hangs. farandole does so instead.
        if not loaded and mpi4py.rc.finalize is None:
            _finalizes, mpi4py.rc.finalize = True, False
        others = {} if loaded or promised < 2 else siblings.Siblings().wait_for_birth()
        with _bounded(seconds, promised, loaded, others), home_for_mpi(), safe_working_folder():
            from mpi4py import MPI
    except FarandoleError:  # a RuntimeError that does not mean that MPI is missing
        raise
    except (ImportError, RuntimeError) as reason:
        raise ImportError(str(reason)) from reason
    if _finalizes:  # also if an earlier call has failed after it had changed mpi4py.rc
        _finalize_at_exit(MPI)
    _at_exit(MPI)
    if MPI.Is_finalized():
        raise LibraryError("MPI is finalised in this process: farandole cannot start any more")
    if not MPI.Is_initialized():  # the user has set mpi4py.rc.initialize = False
        others = siblings.Siblings().wait_for_birth()
        with _bounded(seconds, promised, False, others), home_for_mpi(), safe_working_folder():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


@contextlib.contextmanager
def _bounded(seconds: float, promised: int, loaded: bool, others: Mapping[int, int]) -> Any:
    """Context manager during which the core's watchdog may end this process.

    The watchdog ends it after `seconds`, or if one of the processes in `others`, which maps ranks
    to pids, ends. Python could not do that, because MPI_Init blocks and holds the GIL.
    """
    if loaded or promised < 2:
        yield
        return
    text = (
        f"farandole: init() has waited {seconds:g} s in MPI_Init for the {promised} ranks of this "
        f"job, and ends this process: some have not come; {REMEDY}"
    )
    died = [f"farandole: PeerError: {siblings.died([rank])}".encode() for rank in others]
    keep = [ffi.new("char[]", line) for line in died]
    pids, texts = list(others.values()), ffi.new("char*[]", keep)
    try:
        check_count(lib.farandole_end_after(seconds, text.encode(), len(others), pids, texts))
        yield
    finally:
        lib.farandole_end_after(-1.0, b"", 0, ffi.NULL, ffi.NULL)


@functools.cache
def _finalize_at_exit(mpi: Any) -> None:
    atexit.register(_finalize, mpi, os.getpid())
    # Imported late, because multiprocessing records `__main__` when it is imported.
    from multiprocessing import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:  # forked children of multiprocessing end without atexit
        Finalize(None, _end, (mpi, os.getpid()), exitpriority=-1)  # after leave_now()


@functools.cache
def _at_exit(mpi: Any) -> None:
    atexit.register(Mpi.end_stranded, mpi, os.getpid())


def _end(mpi: Any, owner: int) -> None:
    """Runs both atexit handlers, in the same order as atexit."""
    Mpi.end_stranded(mpi, owner)
    _finalize(mpi, owner)


def _finalize(mpi: Any, owner: int) -> None:
    if os.getpid() == owner and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
