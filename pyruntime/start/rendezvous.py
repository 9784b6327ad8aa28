# SPDX-License-Identifier: Apache-2.0
"""Allgathers for ranks started without MPI, by a Unix socket: of rank 0 under torchrun, of the
launcher in tests. One thread serves.

A client connects and sends its rank. Per round it sends its bytes; when all ranks have, each
receives a list of them in rank order. A client that has waited too long sends None: the server
answers all waiting clients with the missing ranks as text, and these clients give up. When a client
leaves, the server closes all others, so none waits forever; the ranks may then connect again as the
next generation (shutdown and init in a living process).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_PAUSE = 0.02  # seconds between two looks whether the server is there
_LOOK = 0.5  # seconds between two looks whether the others still live
_WHO_SECONDS = 5.0  # for the server to answer who is missing
_TIME = struct.Struct("ll")  # seconds, microseconds
_CLIENT_SECONDS, _SERVER_SECONDS = 30, 2  # until a peer that stops in a message is dropped
_SERVER = "rank 0 (or the launcher, if it serves the rendezvous)"


class NotAll(TimeoutError):
    """Some ranks have not come in time; the text names them."""


def connect(
    path: str, rank: int, wait: float = 0.0, check: Callable[[], None] = lambda: None
) -> Connection:
    """Connects to the server at `path` as `rank`.

    Raises OSError when nobody of this user listens there within `wait` seconds, and what `check`
    raises, which is called now and then.
    """
    deadline = time.monotonic() + wait
    while True:
        plain = _socket()
        try:
            plain.connect(path)
            if not _is_of_this_user(plain):
                raise PermissionError(f"another user's process listens at {path!r}")
            connection = _connection(plain)
            connection.send(rank)
            return connection
        except ConnectionRefusedError:
            plain.close()
            if time.monotonic() >= deadline:
                raise
            check()
            time.sleep(_PAUSE)
        except BaseException:
            plain.close()
            raise


def exchange(
    connection: Connection,
    data: bytes,
    seconds: float = 60.0,
    check: Callable[[], None] = lambda: None,
) -> list[bytes]:
    """Sends `data`; returns what each rank sent, in rank order.

    Raises ConnectionError when a rank has left, NotAll, naming the ranks, when some do not come
    within `seconds`, and what `check` raises, which is called now and then.
    """
    try:
        connection.send(data)
        if not _answers(connection, seconds, check):
            connection.send(None)
            if not connection.poll(_WHO_SECONDS):
                raise NotAll(_SERVER)
        answer = connection.recv()
    except NotAll:
        raise
    except (OSError, EOFError) as error:
        raise ConnectionError("the rendezvous was closed: another rank has left") from error
    if isinstance(answer, str):
        raise NotAll(answer)
    return list(answer)


def _answers(connection: Connection, seconds: float, check: Callable[[], None]) -> bool:
    """Whether there is an answer within `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if connection.poll(min(left, _LOOK)):
            return True
        check()
    return connection.poll(0)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _limit(made, _CLIENT_SECONDS)
    return made


def _limit(plain: socket.socket, seconds: int) -> None:
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(seconds, 0))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(seconds, 0))


def _connection(plain: socket.socket) -> Connection:
    # Imported late: multiprocessing stores the module that is __main__ at its import.
    from multiprocessing.connection import Connection

    return Connection(plain.detach())


def _is_of_this_user(plain: socket.socket) -> bool:
    """Whether the process at the other end is; what it sends is trusted then."""
    data = plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return bool(user == os.geteuid())


class _Client:
    """One connection, its rank once it is known, and what it has sent in this round."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.data: bytes | None = None

    def send(self, answer: Any) -> bool:
        """False: it has left."""
        try:
            self.connection.send(answer)
        except OSError:
            return False
        return True


class RendezvousServer:
    """The launcher's side: one thread, a context manager. `path` is where ranks connect."""

    def __init__(self, size: int, path: str = "") -> None:
        """`path`: an abstract one; else it is in a folder of its own. Raises OSError if taken."""
        self.size = size
        self.rounds = 0  # exchanges completed since the start
        self._folder = None if path else tempfile.TemporaryDirectory(prefix="farandole-")  # 0700
        self.path = str(Path(self._folder.name) / "rendezvous") if self._folder else path
        self._clients: dict[Any, _Client] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(size)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that tell a process this server's address, its rank and the size."""
        return {
            "FARANDOLE_RENDEZVOUS": f"unix:{self.path}",
            "FARANDOLE_RANK": str(rank),
            "FARANDOLE_SIZE": str(self.size),
        }

    def close(self) -> None:
        """Closes all connections and ends the thread."""
        self._wake_writer.close()
        self._thread.join()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.ExitStack() as cleanup:
            if self._folder is not None:
                cleanup.callback(self._folder.cleanup)
            cleanup.callback(self._wake_reader.close)
            cleanup.callback(self._listener.close)
            cleanup.callback(self._drop_all)
            while self._step():
                pass

    def _step(self) -> bool:
        from multiprocessing.connection import wait

        ready = wait([self._wake_reader, self._listener, *self._clients])
        if self._wake_reader in ready:
            return False
        for connection in ready:
            if connection in self._clients and not self._receive(self._clients[connection]):
                self._drop_all()
        if self._listener in ready:  # last: a client leaves the old generation first
            self._accept()
        return True

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except OSError:  # it has hung up, or this process has no descriptor left
            time.sleep(_PAUSE)
            return
        if not _is_of_this_user(plain):
            plain.close()
            return
        _limit(plain, _SERVER_SECONDS)
        client = _Client(_connection(plain))
        self._clients[client.connection] = client

    def _receive(self, client: _Client) -> bool:
        """Receives one message and finishes the round if it was the last; False: start over."""
        try:
            message = client.connection.recv()
        except (OSError, EOFError):  # it has left; who has not said its rank is nobody's peer
            return client.rank is None and self._drop(client)
        by_rank = {c.rank: c for c in self._clients.values() if c.rank is not None}
        if client.rank is None:
            if message not in range(self.size):
                return self._drop(client)
            client.rank = message
            return message not in by_rank  # two say that they are this rank: all hear of it
        waiting = {rank: c for rank, c in by_rank.items() if c.data is not None}
        if message is None:  # who is missing? Too late where the round has ended meanwhile
            gone = ", ".join(f"rank {rank}" for rank in range(self.size) if rank not in waiting)
            return client.rank not in waiting or _send_all(waiting, gone)
        client.data = message
        if len(waiting) + 1 < self.size:
            return True
        answer = [by_rank[rank].data for rank in range(self.size)]
        self.rounds += 1
        for other in by_rank.values():
            other.data = None
        return _send_all(by_rank, answer)

    def _drop(self, client: _Client) -> bool:
        """Closes one connection; the others go on."""
        del self._clients[client.connection]
        client.connection.close()
        return True

    def _drop_all(self) -> None:
        for client in self._clients.values():
            client.connection.close()
        self._clients.clear()


def _send_all(clients: dict[int, _Client], answer: Any) -> bool:
    """To rank 0 last: the server may be in its process, which may end at once then."""
    reached = [clients[rank].send(answer) for rank in sorted(clients, reverse=True)]
    return all(reached)
