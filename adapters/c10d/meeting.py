# SPDX-License-Identifier: Apache-2.0
"""How the ranks of torch.distributed and of farandole find each other, each by the other's means.

`env://`, c10d's default, needs variables that torchrun sets and mpirun does not: where they are
missing, farandole's ranks agree on a store. Ranks that have a store and no launcher, such as those
of torch.multiprocessing, start farandole by it (StoreBootstrap).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import PurePath
from typing import Any
from weakref import finalize

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from farandole import runtime, topology
from farandole.calls.requests import Call, Op, refuse
from farandole.config import setting
from farandole.errors import (
    FarandoleError,
    LibraryError,
    PeerError,
    StallError,
    printable,
    ranks_text,
)
from farandole.objects import broadcast_object
from farandole.start import launchers, torchrun, unmet
from farandole.start.bootstrap import (
    REMEDY,
    Bootstrap,
    Goodbye,
    Goodbyes,
    Left,
    SocketBootstrap,
)
from farandole.start.connection import is_here
from farandole.start.launchers import TORCHRUN
from farandole.start.rendezvous import RendezvousServer
from farandole.start.secret import SECRET, job_secret, mac, remedy
from farandole.start.session import Refused
from farandole.start.sockets import shared_host

__all__ = ["StoreBootstrap", "has_launcher", "meet", "of_torchrun"]

Met = Iterator[tuple[Store, int, int]]  # c10d's: the store, this rank, how many there are
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_LONGEST_NOTE, _LONGEST_RECORD = 2000, 8000  # bytes
_STORE = "torch.distributed store"  # the name of its address's broadcast
_PUBLIC = b"whoever reaches the network knows this"  # the secret under FARANDOLE_TRUST_NETWORK=1
_TRUSTED = (
    "farandole: FARANDOLE_TRUST_NETWORK=1: the job's keys follow from what any process can read "
    "that reaches this network"
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
    unmet.mark_met()
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
    alone = topology.size() == topology.local_size()
    host = "127.0.0.1" if alone else socket.gethostname()
    how: dict[str, Any] = {"wait_for_workers": False}
    if root and alone:  # else torch opens it to all networks
        with socket.create_server((host, 0)) as here:
            port, how["master_listen_fd"] = here.getsockname()[1], here.detach()
        server = TCPStore(host, port, None, True, timeout, **how)
    elif root:
        server = TCPStore("localhost", 0, None, True, timeout, **how)
    host, port = broadcast_object((host, server.port) if server else None, 0, _STORE)
    return server or TCPStore(host, port, None, False, timeout, wait_for_workers=False)


class StoreBootstrap(SocketBootstrap):
    """Ranks that have a c10d store in common, and no MPI; between hosts their data go by TCP.

    By the store they learn where rank 0 listens, and no more: whoever reaches the store can read it
    and write to it. At rank 0 all prove that they know the job's secret, and that they are of this
    job. Without a secret rank 0 listens only where processes of its host and user can call.

    The store remembers what ranks of earlier attempts wrote, which may have died or given up. So a
    rank that reaches nobody, or is left while the ranks meet, looks into the store again.
    """

    def __init__(
        self, store: Store, rank: int, size: int, seconds: float, job: bytes = b""
    ) -> None:
        """Collective; ranks may meet several times in one store, also after some gave up. `job`:
        what else the ranks know of their job, to tell it from others.

        Raises StallError, naming the ranks that do not come, and LibraryError where ranks of
        several hosts have no secret.
        """
        self._store, self._key = PrefixStore("farandole", store), f"rank 0 of {size}"
        secret, self._wrong = _own_secret()
        self._knows, self._host = bool(secret), shared_host()
        self._proof = mac(secret, job, _name_of(store), str(size).encode())
        self._own = b""  # what rank 0 has written into the store
        self._seen = b""  # what was there
        self._noted = ""  # the key of notes why this meeting fails; "": no meeting is under way
        self._server: finalize[..., StoreBootstrap] | None = None
        if rank == 0:
            self._serve(size)
        try:
            super().__init__(self._look, rank, size, seconds, seconds)
        except Refused as reason:
            raise self._note(
                f"who listens where torch.distributed's store says that rank 0 does has not proved "
                f"to be rank 0 of this job, or this rank has not ({reason}): MASTER_ADDR, "
                f"MASTER_PORT, torchrun's run id or the store differs there, or {SECRET} differs "
                f"there, or a stranger writes to the store; {remedy()}"
            ) from reason
        except OSError as reason:
            raise StallError(
                f"init(): ranks [0] did not come to the meeting of all ranks within {seconds:g} s: "
                f"{reason}; {REMEDY}"
            ) from reason
        self._noted = ""
        finalize(self, self._connection.close).atexit = False
        if rank == 0:
            if secret == _PUBLIC and len(set(self.node)) > 1:
                print(_TRUSTED, file=sys.stderr, flush=True)
            if set(self.tasks) == {self.tasks[0]}:
                _tell_of_jobs(size)

    def _serve(self, size: int) -> None:
        """Rank 0 listens, as long as it lives, and says where."""
        server = RendezvousServer(size, self._proof, here=not self._knows)
        self._server = finalize(self, server.close)
        self._server.atexit = False
        text = json.dumps([self._host, server.address])
        self._own = text.encode()
        with _store_answers():
            self._store.set(self._key, text)

    def _look(self) -> tuple[str, bytes] | None:
        """Returns where rank 0 listens now, and what is proved there. None: it has not said so yet.
        Raises LibraryError where they can't meet."""
        self._seen = self._own or self._read(self._key)
        if not self._seen:
            return None
        host, address = _read_record(self._seen)
        self._noted = f"notes at {address}"
        without = [0] * is_here(address) + [self.rank] * (not self._knows)
        if len(without) == 1 or (without and host != self._host):
            have = "has" if len(without) == 1 else "have"
            text = (
                "the ranks are on several hosts and meet by torch.distributed's store, which any "
                f"process that reaches it can read; {ranks_text(without)} {have} no secret to "
                f"derive keys from, or a stranger writes to the store; {remedy()}"
            )
            raise self._note(str(self._wrong or text))
        return address, self._proof

    def _check(self) -> None:
        """Raises LibraryError if another rank says that this meeting fails, Left if rank 0 has
        opened another one."""
        super()._check()
        if not self._noted:
            return
        if (told := self._read(self._key)) != self._seen:
            if self._own:
                raise LibraryError(f"init(): {_written(told)}")
            raise Left("rank 0 meets the ranks elsewhere")
        if note := self._read(self._noted):
            text = note[:_LONGEST_NOTE].decode(errors="replace")
            raise LibraryError(f"init(): {printable(text)}")

    def _note(self, text: str) -> LibraryError:
        """The error to raise; the others hear of it."""
        with _store_answers():
            self._store.set(self._noted, f"rank {self.rank}: {text}")
        return LibraryError(f"init(): {text}")

    def _read(self, key: str) -> bytes:
        """Returns what is there; b"" for nothing. Never waits, as get() does if a stranger has
        removed it, unless the store is a class of the user's without compare_set()."""
        with _store_answers():
            try:
                return self._store.compare_set(key, "", "")
            except RuntimeError as reason:
                if "Not implemented" not in str(reason):
                    raise
            return self._store.get(key) if self._store.check([key]) else b""

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Leaves without a goodbye, since the same ranks may meet again."""
        self.hang_up()
        return Goodbyes(goodbye, lambda: None)  # the store may have ended with rank 0

    def hang_up(self) -> None:
        """Leaves without a word; the others notice."""
        super().hang_up()
        if self._server is not None:
            self._server()


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
        PrefixStore(f"init of attempt {attempt}", store),
        TORCHRUN.rank,
        TORCHRUN.size,
        seconds,
        torchrun.job(),
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


def _read_record(told: bytes) -> tuple[str, str]:
    """Rank 0's host, and where it listens, by the store, where anybody may change it."""
    try:
        host, address = map(str, json.loads(told[:_LONGEST_RECORD]))
        if not (address.isascii() and address.isprintable()):
            raise ValueError("no server of rank 0 has such an address")
        return host, address
    except (ValueError, TypeError, RecursionError) as reason:
        raise LibraryError(f"init(): {_written(told)}") from reason


def _written(told: bytes) -> str:
    return f"a stranger writes to torch.distributed's store: {told[:80]!r} for rank 0; {remedy()}"


def _name_of(store: Store) -> bytes:
    """Tells the store from others, where that is alike for all ranks."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    path = PurePath(getattr(store, "path", ""))  # hosts may have mounted it at different places
    return f"{getattr(store, 'port', '')} {'/'.join(path.parts[-2:])}".encode()


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


def _own_secret() -> tuple[bytes, LibraryError | None]:
    """This rank's, b"" for none; or why it can't be used: the others must hear of it first."""
    try:
        trusts = setting("FARANDOLE_TRUST_NETWORK") == "1"
        return job_secret() or _PUBLIC * trusts, None
    except LibraryError as reason:
        return b"", reason
