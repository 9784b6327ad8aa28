# SPDX-License-Identifier: Apache-2.0
"""How the ranks meet: who they are, and one all-gather of opaque bytes that brings the core up."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from farandole.config import config
from farandole.errors import LibraryError, PeerError, StallError
from farandole.start import ancestry, rendezvous

__all__ = [
    "REMEDY",
    "Bootstrap",
    "Coming",
    "Farewell",
    "Parting",
    "connect",
    "launched_rank",
    "promised_ranks",
]

# Variables by which launchers tell each process how many there are.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (mpiexec, srun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_DEFAULT_SECONDS = 60.0  # where FARANDOLE_INIT_TIMEOUT can't be read: the core says so soon
GRACE = 1.5  # seconds that a leaving rank waits for the others to leave too
REMEDY = (
    "every rank must call init() equally often and with the same arguments; a rank may also be "
    "stopped, or have ended before; FARANDOLE_INIT_TIMEOUT sets how long the others wait"
)


class Coming(Enum):
    """Whether a rank that leaves will be at the next init()."""

    ANEW = "a"  # at once: elastic training starts anew
    PERHAPS = "p"  # if its program calls init() again
    NEVER = "n"  # its process ends


@dataclass(frozen=True)
class Farewell:
    """What a rank tells the others when it leaves."""

    coming: Coming
    cause: str = ""  # why it leaves; empty: it has finished normally

    BYTES = 512

    def encode(self) -> bytes:
        """As many bytes for every rank: texts are cut."""
        text = (self.coming.value + self.cause).encode()[: self.BYTES]
        return text.ljust(self.BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Farewell:
        """The inverse."""
        text = data.rstrip(b"\0").decode(errors="ignore")
        return cls(Coming(text[0]), text[1:])


class Parting:
    """What all ranks of a job said when they left it, as far as they have."""

    def __init__(self, own: Farewell, all_said: Callable[[], list[Farewell] | None]) -> None:
        """`all_said`: what each has said, by rank; None while some have not."""
        self._own = own
        self._all_said = all_said

    def check(self, expected: Callable[[int], bool] = lambda rank: True) -> None:
        """Raises PeerError if a rank that is `expected` at the next init() will not come there."""
        for rank, other in enumerate(self._all_said() or ()):
            ends = other.coming is Coming.NEVER
            ends |= self._own.coming is Coming.ANEW and other.coming is Coming.PERHAPS
            if ends and expected(rank):
                cause = other.cause or "it has finished normally"
                raise PeerError(
                    f"rank {rank} left: {cause}; it does not come back, so init() can't start "
                    "the same ranks anew"
                )


class Bootstrap(ABC):
    """The ranks' meeting place while the core is not up yet. `node[r]` names the shared-memory
    host of rank r by its lowest rank. No wait takes longer than `seconds`, but where it says so."""

    rank: int
    size: int
    node: list[int]
    seconds: float

    @abstractmethod
    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """What each rank gives, in rank order. Collective.

        Raises StallError naming the ranks that do not come within `seconds`, PeerError where one
        has told that it will not.
        """

    def comm_address(self) -> int:
        """Where an MPI_Comm of these ranks lies, for messages between hosts; 0: there is none."""
        return 0

    @abstractmethod
    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        """Leaves the meeting place after the core has shut down; waits for GRACE at most.

        `failed`: abnormally; `broken`: the job had ended before, by somebody's failure.
        """

    @abstractmethod
    def abandon(self, reason: BaseException) -> None:
        """This rank alone gives up in the middle of init(): tells those who wait for it why."""

    def world_ranks(self, comm: Any) -> list[int]:
        """This world's ranks in an mpi4py communicator, ascending. ValueError where unknown."""
        raise ValueError("this job was not started by MPI: give a list of ranks")

    def on_finalize(self, leave: Callable[[], object]) -> None:  # noqa: B027
        """Has `leave` called when the user finalises what the ranks met by."""


class Solo(Bootstrap):
    """A world of one, where there is no MPI."""

    rank, size, seconds = 0, 1, 0.0

    def __init__(self) -> None:
        self.node = [0]

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        return [data]

    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        return Parting(farewell, lambda: [farewell])

    def abandon(self, reason: BaseException) -> None:
        pass


class Rendezvous(Bootstrap):
    """Ranks of one host that a launcher without MPI started, through its Unix socket."""

    def __init__(self, address: str, parting: Parting | None, seconds: float) -> None:
        """`address` is unix:<path>; FARANDOLE_RANK and FARANDOLE_SIZE give this rank's place."""
        scheme, _, path = address.partition(":")
        if scheme != "unix":
            raise ValueError(f"FARANDOLE_RENDEZVOUS={address}: must be unix:<path>")
        if parting is not None:
            parting.check()
        self.rank = int(os.environ["FARANDOLE_RANK"])
        self.size = int(os.environ["FARANDOLE_SIZE"])
        self.node = [0] * self.size
        self.seconds = seconds
        try:
            self._socket = rendezvous.connect(path, self.rank, seconds)
        except OSError as error:
            raise LibraryError(
                f"init(): nobody answers at FARANDOLE_RENDEZVOUS={address}: {error}; the launcher "
                "that opened it must live as long as its ranks"
            ) from error

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        limit = self.seconds if seconds is None else seconds
        self._socket.settimeout(limit)
        try:
            return rendezvous.exchange(self._socket, data, self.size)
        except rendezvous.NotAll as late:
            raise StallError(
                f"init(): {late} did not come to the meeting of all ranks within {limit:g} s; "
                f"{REMEDY}"
            ) from late
        except ConnectionError as error:
            raise PeerError(
                f"init(): another rank has left while the ranks met: {error}"
            ) from error

    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        said: list[Farewell] | None = None
        self._socket.settimeout(GRACE)
        try:
            answers = rendezvous.exchange(self._socket, farewell.encode(), self.size)
            said = [Farewell.decode(answer) for answer in answers]
        except (OSError, rendezvous.NotAll):
            pass  # some rank is dead, or has not left yet
        self._socket.close()
        return Parting(farewell, lambda: said)

    def abandon(self, reason: BaseException) -> None:
        self._socket.close()  # the others see that


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


def _seconds() -> float:
    """FARANDOLE_INIT_TIMEOUT; a mistake in any setting is told where all ranks hear of it."""
    try:
        found = {variable.name: variable.value for variable in config()}
    except ValueError:
        return _DEFAULT_SECONDS
    return float(found["FARANDOLE_INIT_TIMEOUT"])


def connect(comm: Any = None, parting: Parting | None = None) -> Bootstrap:
    """Meets the other ranks, by whatever started this process.

    `comm` as in init(); `parting`: how they left the last job. Raises ShutdownError in the child of
    a rank, LibraryError where the launcher promises more ranks than MPI finds, ValueError for a
    wrong `comm`, StallError naming the ranks that do not come, PeerError for those that can't.
    """
    ancestry.check()
    ancestry.claim()
    address = os.environ.get("FARANDOLE_RENDEZVOUS")
    if address:
        if comm:
            raise ValueError("init(comm=...) needs MPI; this job was started without it")
        return Rendezvous(address, parting, _seconds())
    from farandole.start import mpi_ranks

    launcher, promised = _promised()
    mpi = mpi_ranks.load(launcher, promised, _seconds())
    if mpi is None:
        if comm:
            raise ValueError("init(comm=...) needs MPI, and mpi4py finds none")
        return Solo()
    if promised > 1 and mpi.COMM_WORLD.Get_size() == 1:
        library = mpi.Get_library_version().split("\n")[0].strip("\x00 ")
        raise LibraryError(
            f"{launcher} says {promised} processes, but MPI says 1: the launcher and the MPI "
            f"library that mpi4py loaded ({library}) do not belong together. Remedy: start with "
            "the mpirun of that library (`python -m mpi4py --mpi-lib-version`; under Slurm "
            "try `srun --mpi=pmix`)"
        )
    return mpi_ranks.Mpi(mpi, comm, parting, _seconds())
