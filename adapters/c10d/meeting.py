# SPDX-License-Identifier: Apache-2.0
"""How the ranks of torch.distributed and of farandole find each other, each by the other's means.

`env://`, c10d's default, needs variables that torchrun sets and mpirun does not: where they are
missing, farandole's ranks agree on a store. Ranks that have a store and no launcher, such as those
of torch.multiprocessing, start farandole by it (StoreBootstrap).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from itertools import count
from pathlib import Path
from uuid import uuid4
from weakref import finalize

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from farandole import runtime, topology
from farandole.calls.requests import Call, Op, refuse
from farandole.config import setting
from farandole.errors import FarandoleError, LibraryError, PeerError, StallError, ranks_text
from farandole.objects import broadcast_object
from farandole.start import launchers, unmet
from farandole.start.bootstrap import REMEDY, Bootstrap, Farewell, Parting, SocketBootstrap
from farandole.start.launchers import TORCHRUN
from farandole.start.rendezvous import RendezvousServer
from farandole.start.secret import SECRET, Seal, job_secret, remedy

__all__ = ["StoreBootstrap", "has_launcher", "meet", "of_torchrun"]

Met = Iterator[tuple[Store, int, int]]  # c10d's: the store, this rank, how many there are
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_LONGEST_PAUSE = 0.25  # seconds between two looks into a store
_STORE = "torch.distributed store"  # the name of its address's broadcast
_SOCKET, _NAME = "\0farandole-", 32  # of ranks of one host: the name's beginning, what follows
_TRUSTED = (
    "farandole: FARANDOLE_TRUST_NETWORK=1: the job's keys pass torch.distributed's store, which "
    "any process that reaches it can read"
)


def has_launcher() -> bool:
    """Whether farandole.init() can know this process's place among others. By WORLD_SIZE alone,
    without RANK, it can't: torch.multiprocessing's users set it for their own scripts."""
    named = os.environ.get("FARANDOLE_RENDEZVOUS", "") not in ("", "none")
    found = launchers.launcher()
    return named or (found.size > 0 and not (found is TORCHRUN and found.rank < 0))


def meet(asked: dict[str, int], timeout: timedelta) -> Met | None:
    """What env:// gives where farandole's ranks find each other; None where nothing says who they
    are. Collective. Raises ValueError where `asked`, a "rank" or "world_size", is not theirs."""
    unmet.excuse()
    if not (topology.is_initialized() or has_launcher()):
        return None
    runtime.init()
    own = {"rank": topology.rank(), "world_size": topology.size()}
    if asked | own != own | asked:
        reason = ValueError(
            f"init_process_group(rank=, world_size=) says {asked}, but farandole's job, by its "
            f"launcher, says {own}; leave both out"
        )
        refuse(Call(Op.BROADCAST, f"{_STORE}.length"), reason)
        raise reason
    return iter([(_open_store(timeout), own["rank"], own["world_size"])])


def _open_store(timeout: timedelta) -> TCPStore:
    """A store that rank 0 serves at a free port; collective."""
    root, server = topology.rank() == 0, None
    if root:
        server = TCPStore("localhost", 0, None, True, timeout, wait_for_workers=False)
    alone = topology.size() == topology.local_size()
    host = "localhost" if alone else socket.gethostname()
    host, port = broadcast_object((host, server.port) if server else None, 0, _STORE)
    return server or TCPStore(host, port, None, False, timeout, wait_for_workers=False)


class StoreBootstrap(Bootstrap):
    """Ranks that have a c10d store in common, and no MPI; between hosts their data go by TCP.

    The store remembers what ranks of earlier attempts wrote, which may have died or given up. So a
    meeting has a name that nobody has used, by which the ranks agree that they all are there now:
    every rank but 0 has a ticket for its attempt; rank 0 answers each with the meeting's name, and
    says go when all holders of the latest tickets have said that they are here.

    Whoever reaches the store can read it and write to it, so no key passes it. Ranks of one host
    learn by it only the random name of a Unix socket, and go on there; ranks of several hosts seal
    what they write with the job's secret.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        """Collective; ranks may meet several times in one store, also after some gave up.

        Raises StallError, naming the ranks that do not come, and LibraryError where ranks of
        several hosts have no secret.
        """
        self.rank, self.size, self.seconds = rank, size, seconds
        self._store = PrefixStore("farandole", store)
        deadline = time.monotonic() + seconds
        with _store_answers():
            meeting = self._open(deadline) if rank == 0 else self._find(deadline)
        self._store = PrefixStore(meeting, self._store)
        self._rounds = count()
        self._seal: Seal | None = None
        self._socket: SocketBootstrap | None = None
        secret, wrong = _own_secret()
        trusts = setting("FARANDOLE_TRUST_NETWORK") == "1" and wrong is None
        own = _Trust.SECRET if secret else _Trust.NETWORK if trusts else _Trust.NOTHING
        task = str(launchers.launcher().rank)
        told = self.allgather(_Place(_host(), own, uuid4().hex, task).encode())
        places = [_Place.decode(rank, text) for rank, text in enumerate(told)]
        if rank == 0 and {place.task for place in places} == {task}:
            _tell_of_jobs(size)
        hosts = [place.host for place in places]
        self.node = [hosts.index(host) for host in hosts]
        if len(set(hosts)) == 1:
            self._socket = self._at_socket()
            finalize(self, self._socket.hang_up).atexit = False
            return
        if wrong is not None:
            raise wrong
        _check_trust(own, places)
        if secret:
            self._seal = Seal(secret, b"".join(told))
        elif rank == 0:
            print(_TRUSTED, file=sys.stderr, flush=True)

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """The data of every rank, in rank order, by the socket or the store. Collective."""
        if self._socket is not None:
            return self._socket.allgather(data, seconds)
        limit, number = self.seconds if seconds is None else seconds, next(self._rounds)
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        if self._seal is not None:
            data = self._seal.close(keys[self.rank], data)
        with _store_answers():
            self._store.set(keys[self.rank], data.hex())
            if _until(lambda: self._are(keys), time.monotonic() + limit):
                return [self._read(rank, key) for rank, key in enumerate(keys)]
            missing = [rank for rank, key in enumerate(keys) if not self._are([key])]
        raise self._stalled(missing, limit)

    def _read(self, rank: int, key: str) -> bytes:
        try:
            data = bytes.fromhex(self._get(key))
            return data if self._seal is None else self._seal.open(key, data)
        except ValueError as reason:
            raise LibraryError(
                f"init(): torch.distributed's store holds data for rank {rank} that nobody "
                f"with this rank's secret wrote ({reason}); a stranger writes to the store, or "
                f"{SECRET} differs there; {remedy()}"
            ) from reason

    def _at_socket(self) -> SocketBootstrap:
        """A socket of rank 0, to which only processes of this user are let."""
        name, deadline = uuid4().hex, time.monotonic() + self.seconds
        with _store_answers():
            if self.rank == 0:
                server = RendezvousServer(self.size, _SOCKET + name)
                finalize(self, server.close).atexit = False  # it lives as long as this rank
                self._store.set("socket", name)
            elif not _until(lambda: self._are(["socket"]), deadline):
                raise self._stalled([0], self.seconds)
            else:
                name = self._get("socket")
        try:
            return SocketBootstrap(_SOCKET + name[:_NAME], self.rank, self.size, self.seconds)
        except OSError as reason:
            raise PeerError(
                f"init(): rank 0 does not answer at the socket that torch.distributed's store "
                f"names: {reason}; rank 0 has ended, or a stranger writes to the store"
            ) from reason

    def _open(self, deadline: float) -> str:
        """Rank 0's side of the meeting."""
        meeting = uuid4().hex
        answered: set[str] = set()
        missing: list[int] = []

        def all_here() -> bool:
            nonlocal missing
            for rank in range(1, self.size):
                ticket = self._get(f"ticket of {rank}")
                if ticket and ticket not in answered:
                    answered.add(ticket)
                    self._store.set(f"meeting of {ticket}", meeting)
            missing = self._missing(meeting)
            return not missing

        if not _until(all_here, deadline):
            raise self._stalled(missing, self.seconds)
        self._store.set(f"go {meeting}", "yes")
        return meeting

    def _find(self, deadline: float) -> str:
        """The side of the other ranks; rank 0 may give up meanwhile, and open another meeting."""
        ticket, meeting = uuid4().hex, ""
        self._store.set(f"ticket of {self.rank}", ticket)

        def may_go() -> bool:
            nonlocal meeting
            latest = self._get(f"meeting of {ticket}")
            if latest != meeting:
                meeting = latest
                self._store.set(f"{ticket} is in {meeting}", "yes")
            return bool(meeting) and self._are([f"go {meeting}"])

        if not _until(may_go, deadline):
            raise self._stalled((meeting and self._missing(meeting)) or [0], self.seconds)
        return meeting

    def _missing(self, meeting: str) -> list[int]:
        """Ranks that are not in that meeting with their latest ticket."""
        tickets = {rank: self._get(f"ticket of {rank}") for rank in range(1, self.size)}
        return [r for r, t in tickets.items() if not self._are([f"{t} is in {meeting}"])]

    def _are(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        if hasattr(self._store, "check"):
            return self._store.check(keys)
        try:
            self._store.wait(keys, timedelta(milliseconds=1))  # torch before 2.4
        except RuntimeError:
            return False
        return True

    def _get(self, key: str) -> str:
        """What is there; "" if nothing is."""
        return self._store.get(key).decode(errors="replace") if self._are([key]) else ""

    def _stalled(self, missing: list[int], limit: float) -> StallError:
        return StallError(
            f"init(): ranks {missing} did not come to the meeting of all ranks within "
            f"{limit:g} s; {REMEDY}"
        )

    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        """Leaves without a farewell, since the same ranks may meet again."""
        return Parting(farewell, lambda: None)  # the store may have ended with rank 0

    def abandon(self, reason: BaseException) -> None:
        """Hangs up where there is a socket; else the others' wait has a limit."""
        if self._socket is not None:
            self._socket.abandon(reason)


def of_torchrun(seconds: float) -> Bootstrap:
    """The ranks of several hosts that torchrun or its variables name, by torchrun's store or, where
    there is none, that of rank 0."""
    address = [os.environ.get(name, "") for name in _ADDRESS]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _store_at(*address, TORCHRUN.rank == 0 and not agent, seconds)
    except (RuntimeError, ValueError) as reason:
        raise StallError(
            f"init(): no store answers at MASTER_ADDR and MASTER_PORT, {':'.join(address)}, within "
            f"{seconds:g} s: {reason}; {REMEDY}"
        ) from reason
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return StoreBootstrap(
        PrefixStore(f"attempt {attempt} of {TORCHRUN.size}", store),
        TORCHRUN.rank,
        TORCHRUN.size,
        seconds,
    )


@cache  # rank 0 serves it for its process's life; torch opens its own at the same port beside it
def _store_at(host: str, port: str, serves: bool, seconds: float) -> TCPStore:
    limit = timedelta(seconds=seconds)
    return TCPStore(host, int(port), None, serves, limit, wait_for_workers=False, multi_tenant=True)


@contextmanager
def _store_answers() -> Iterator[None]:
    """A context in which an error of the store is one of the rank or agent that serves it."""
    try:
        yield
    except FarandoleError:
        raise
    except RuntimeError as reason:
        raise PeerError(
            "init(): torch.distributed's store has ended, with rank 0 or torchrun's agent: "
            f"{reason}; {REMEDY}"
        ) from reason


def _until(there: Callable[[], bool], deadline: float) -> bool:
    """Whether `there` came true in time; it looks again and again, more and more rarely."""
    pause = 0.001
    while not there():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


class _Trust(Enum):
    """By what a rank trusts what it reads in the store."""

    SECRET = "secret"  # by the job's secret
    NETWORK = "network"  # FARANDOLE_TRUST_NETWORK=1
    NOTHING = "nothing"


@dataclass(frozen=True)
class _Place:
    """What a rank tells before the ranks know whether they share a host. Anybody may read it."""

    host: str
    trust: _Trust
    number: str  # at random, so that no other meeting has the same seals
    task: str  # the launcher's process that it is, or whose child it is

    def encode(self) -> bytes:
        return "\n".join([self.host, self.trust.value, self.number, self.task]).encode()

    @classmethod
    def decode(cls, rank: int, told: bytes) -> _Place:
        try:
            host, trust, number, task = told.decode().split("\n")
            return cls(host, _Trust(trust), number, task)
        except ValueError as reason:
            raise LibraryError(
                f"init(): a stranger writes to torch.distributed's store: {told[:80]!r} for rank "
                f"{rank}; {remedy()}"
            ) from reason


def _tell_of_jobs(size: int) -> None:
    """Says so if each process of a launcher has started its own job. It does not raise, since a
    search may want that."""
    if (found := launchers.launcher()).size > 1:
        text = (
            f"farandole: {found} started {found.size} processes, but the {size} ranks of this job "
            f"are children of number {found.rank} alone: each trains its own model. Remedy: for "
            f"one job, give init_process_group world_size={found.size * size} and one address"
        )
        print(text, file=sys.stderr, flush=True)


def _host() -> str:
    """What ranks that can share memory have in common: a machine's start, and a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def _own_secret() -> tuple[bytes, LibraryError | None]:
    """This rank's, or why it can't be used: the others must hear of it first."""
    try:
        return job_secret(), None
    except LibraryError as reason:
        return b"", reason


def _check_trust(own: _Trust, places: Sequence[_Place]) -> None:
    """Raises LibraryError, on every rank, unless all ranks have a secret, or all do without."""
    have = {each: [r for r, place in enumerate(places) if place.trust is each] for each in _Trust}
    if own is _Trust.NOTHING or len(have[own]) < len(places):
        without = ranks_text(have[_Trust.NOTHING] or have[_Trust.NETWORK])
        raise LibraryError(
            "init(): the ranks are on several hosts and meet by torch.distributed's store, which "
            f"any process that reaches it can read; {without} "
            f"{'has' if without.startswith('rank ') else 'have'} no secret to hide keys from "
            f"it; {remedy()}"
        )
