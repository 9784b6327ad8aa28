# SPDX-License-Identifier: Apache-2.0
"""Lets torch.distributed find a job's ranks through farandole, and farandole through torch.

`env://`, c10d's default, needs variables that torchrun sets and mpirun does not set. If the
variables are missing, meet() lets farandole's ranks agree on a store. Ranks that have a store but
no launcher, such as those of torch.multiprocessing, start farandole over that store, through
StoreBootstrap.
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

Met = Iterator[tuple[Store, int, int]]  # what c10d expects: store, rank, world size
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_LONGEST_NOTE, _LONGEST_RECORD = 2000, 8000  # bytes
_STORE = "torch.distributed store"  # name of the call that broadcasts the store's address
# Replaces the secret if FARANDOLE_TRUST_NETWORK=1.
_PUBLIC = b"whoever reaches the network knows this"
_TRUSTED = (
    "farandole: FARANDOLE_TRUST_NETWORK=1: any process that reaches this network can derive the "
    "job's keys"
)


def has_launcher() -> bool:
    """Returns True if farandole.init() can find this process's rank.

    WORLD_SIZE without RANK does not count, because users of torch.multiprocessing set it for their
    own scripts.
    """
    named = os.environ.get("FARANDOLE_RENDEZVOUS", "") not in ("", "none")
    found = launchers.launcher()
    return named or (found.size > 0 and not (found is TORCHRUN and found.rank < 0))


def meet(asked: dict[str, int], timeout: timedelta) -> Met | None:
    """Opens a store for env:// over farandole's ranks. This is a collective.

    Returns None if init() has not run and no launcher has started this process. Raises ValueError
    if `asked` has a "rank" or "world_size" that differs from farandole's.
    """
    unmet.mark_met()
    if not (topology.is_initialized() or has_launcher()):
        return None
    runtime.init()
    own = {"rank": topology.rank(), "world_size": topology.size()}
    if asked | own != own | asked:
        reason = ValueError(
            f"init_process_group(rank=, world_size=) was given {asked}, but farandole's launcher "
            f"says {own}; leave both out"
        )
        refuse(Call(Op.BROADCAST, f"{_STORE}.length"), reason)
        raise reason
    return iter([(_open_store(timeout), own["rank"], own["world_size"])])


def _open_store(timeout: timedelta) -> TCPStore:
    """Opens a store that rank 0 serves at a free port. This is a collective."""
    root, server = topology.rank() == 0, None
    alone = topology.size() == topology.local_size()
    host = "127.0.0.1" if alone else socket.gethostname()
    how: dict[str, Any] = {"wait_for_workers": False}
    if root and alone:  # passes a socket of farandole, because torch's would listen on all networks
        with socket.create_server((host, 0)) as here:
            port, how["master_listen_fd"] = here.getsockname()[1], here.detach()
        try:
            server = TCPStore(host, port, None, True, timeout, **how)
        except NotImplementedError:  # in torch 2.4 to 2.7 at least, libuv takes no socket
            server = TCPStore(host, port, None, True, timeout, use_libuv=False, **how)
    elif root:
        server = TCPStore("localhost", 0, None, True, timeout, **how)
    host, port = broadcast_object((host, server.port) if server else None, 0, _STORE)
    return server or TCPStore(host, port, None, False, timeout, wait_for_workers=False)


class StoreBootstrap(SocketBootstrap):
    """Bootstrap of ranks that share a c10d store and have no MPI. Between hosts they use TCP.

    The store holds only rank 0's address, because any process that reaches the store can read and
    write it. Every rank proves to rank 0 that it belongs to this job and knows the job's secret.
    Without a secret, rank 0 accepts only processes of the same host and user.

    The store keeps entries of earlier attempts, whose ranks may have died or given up. A rank
    therefore reads the store again if it cannot connect to rank 0, or if it loses the connection
    during the meeting.
    """

    def __init__(
        self, store: Store, rank: int, size: int, seconds: float, job: bytes = b""
    ) -> None:
        """Meets the other ranks. This is a collective.

        It may be repeated with the same store, even after a failure. `seconds` is the time limit.
        `job` holds more secret bytes, which only the ranks of this job know. Raises StallError with
        the missing ranks after the time limit, and LibraryError if ranks on several hosts have no
        secret.
        """
        self._store, self._key = PrefixStore("farandole", store), f"rank 0 of {size}"
        secret, self._wrong = _own_secret()
        self._knows, self._host = bool(secret), shared_host()
        self._proof = mac(secret, job, _name_of(store), str(size).encode())
        self._own = b""  # the entry that rank 0 has written; empty on other ranks
        self._seen = b""  # rank 0's entry, as this rank has read it
        self._noted = ""  # key of the note that says why this meeting fails; "" outside a meeting
        self._server: finalize[..., StoreBootstrap] | None = None
        if rank == 0:
            self._serve(size)
        try:
            super().__init__(self._look, rank, size, seconds, seconds)
        except Refused as reason:
            raise self._note(
                f"torch.distributed's store names a process as rank 0, but this rank and that "
                f"process could not prove to each other that they are of one job ({reason}). "
                f"MASTER_ADDR, MASTER_PORT, torchrun's run id, the store or {SECRET} differs "
                f"between the two, or a stranger writes to the store; {remedy()}"
            ) from reason
        except OSError as reason:
            raise StallError(
                f"init(): rank 0 did not come to the rendezvous of all ranks within {seconds:g} s: "
                f"{reason}; {REMEDY}"
            ) from reason
        self._noted = ""
        finalize(self, self._connection.close).atexit = False
        if rank == 0:
            if secret == _PUBLIC and len(set(self.node)) > 1:
                print(_TRUSTED, file=sys.stderr, flush=True)
            if set(self.tasks) == {self.tasks[0]}:
                _warn_of_separate_jobs(size)

    def _serve(self, size: int) -> None:
        """Makes rank 0 listen until close() or hang_up(), and writes its address into the store."""
        server = RendezvousServer(size, self._proof, here=not self._knows)
        self._server = finalize(self, server.close)
        self._server.atexit = False
        text = json.dumps([self._host, server.address])
        self._own = text.encode()
        with _store_answers():
            self._store.set(self._key, text)

    def _look(self) -> tuple[str, bytes] | None:
        """Returns rank 0's address and the proof to show there, or None if there is no entry yet.

        Raises LibraryError if the ranks cannot meet.
        """
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
        """Raises an error if this meeting cannot succeed.

        Raises LibraryError if another rank reports that the meeting fails, and Left if rank 0 has
        started another meeting.
        """
        super()._check()
        if not self._noted:
            return
        if (told := self._read(self._key)) != self._seen:
            if self._own:
                raise LibraryError(f"init(): {_written(told)}")
            raise Left("rank 0 listens at another address now")
        if note := self._read(self._noted):
            text = note[:_LONGEST_NOTE].decode(errors="replace")
            raise LibraryError(f"init(): {printable(text)}")

    def _note(self, text: str) -> LibraryError:
        """Writes into the store why the meeting fails. Returns the error that this rank raises."""
        with _store_answers():
            self._store.set(self._noted, f"rank {self.rank}: {text}")
        return LibraryError(f"init(): {text}")

    def _read(self, key: str) -> bytes:
        """Returns the value of `key`, or b"" if there is none.

        Uses compare_set(), which never waits. get() would wait forever if a stranger removed the
        key. A store class that a user has written may lack compare_set().
        """
        with _store_answers():
            try:
                return self._store.compare_set(key, "", "")
            except RuntimeError as reason:
                if "Not implemented" not in str(reason):
                    raise
            return self._store.get(key) if self._store.check([key]) else b""

    def close(self, goodbye: Goodbye, failed: bool, broken: bool) -> Goodbyes:
        """Leaves without a message to the other ranks, because the same ranks may meet again."""
        self.hang_up()
        return Goodbyes(goodbye, lambda: None)  # the store may have ended with rank 0

    def hang_up(self) -> None:
        """Closes the connection. The other ranks notice this."""
        super().hang_up()
        if self._server is not None:
            self._server()


def of_torchrun(seconds: float) -> Bootstrap:
    """Returns the bootstrap for ranks on several hosts that have torchrun's variables.

    The ranks meet in torchrun's store, or in a store that rank 0 opens.
    """
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


@cache  # keeps the store open until rank 0 ends; multi_tenant lets torch share the port
def _store_at(host: str, port: str, serves: bool, seconds: float) -> TCPStore:
    limit = timedelta(seconds=seconds)
    return TCPStore(host, int(port), None, serves, limit, wait_for_workers=False, multi_tenant=True)


@contextmanager
def _store_answers() -> Iterator[None]:
    """Turns a store's error into a PeerError about the rank or agent that serves the store."""
    try:
        yield
    except FarandoleError:
        raise
    except RuntimeError as reason:
        raise PeerError(
            "init(): torch.distributed's store has ended, because rank 0 or torchrun's agent has: "
            f"{reason}; {REMEDY}"
        ) from reason


def _read_record(told: bytes) -> tuple[str, str]:
    """Decodes rank 0's host and address. Checks both, because anybody can write to the store."""
    try:
        host, address = map(str, json.loads(told[:_LONGEST_RECORD]))
        if not (address.isascii() and address.isprintable()):
            raise ValueError("not an address of rank 0")
        return host, address
    except (ValueError, TypeError, RecursionError) as reason:
        raise LibraryError(f"init(): {_written(told)}") from reason


def _written(told: bytes) -> str:
    return f"a stranger writes to torch.distributed's store: {told[:80]!r} for rank 0; {remedy()}"


def _name_of(store: Store) -> bytes:
    """Returns bytes that identify the store: its port and the end of its path.

    They are equal on all ranks.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    path = PurePath(getattr(store, "path", ""))  # hosts may mount the file at different paths
    return f"{getattr(store, 'port', '')} {'/'.join(path.parts[-2:])}".encode()


def _warn_of_separate_jobs(size: int) -> None:
    """Warns if each process of a launcher has started its own job.

    Does not raise an error, because a parameter search may want separate jobs.
    """
    if (found := launchers.launcher()).size > 1:
        text = (
            f"farandole: {found} started {found.size} processes, but all {size} ranks of this job "
            f"are children of process {found.rank}: each process trains its own model. Remedy: for "
            f"one job, give init_process_group world_size={found.size * size} and one address"
        )
        print(text, file=sys.stderr, flush=True)


def _own_secret() -> tuple[bytes, LibraryError | None]:
    """Returns this rank's secret or b"", and the error to raise once other ranks have seen it."""
    try:
        trusts = setting("FARANDOLE_TRUST_NETWORK") == "1"
        return job_secret() or _PUBLIC * trusts, None
    except LibraryError as reason:
        return b"", reason
