# SPDX-License-Identifier: Apache-2.0
"""How ranks started without MPI meet: all-gathers of bytes by a Unix socket of their launcher.

A client connects and sends its rank (4 bytes). Per round it sends a length (8 bytes) and that many
bytes; when all ranks have, each receives `size` such records in rank order. All integers are
little-endian. A client that has waited too long sends the length _WHO and nothing else: the server
answers all that wait with _WHO and one record, the ranks that have sent nothing, as text; these
clients give up. A client that leaves makes the server close all others, so nobody waits in vain;
the ranks may then connect again and form the next generation (shutdown and init in a living
process).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import TracebackType

_RANK = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_WHO = (1 << 64) - 1
_WHO_SECONDS = 5.0  # that the server may take to answer that
_CHUNK = 1 << 20
_SEND_TIMEOUT = 30.0  # seconds until a client that does not read its answer is given up


class NotAll(TimeoutError):
    """Some ranks have not come in time; the text names them."""


def connect(path: str, rank: int, timeout: float = 60.0) -> socket.socket:
    """Connect to the server at `path` as `rank`; `timeout` in seconds bounds each later exchange.

    Raises OSError when nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.sendall(_RANK.pack(rank))
    except BaseException:
        connection.close()
        raise
    return connection


def exchange(connection: socket.socket, data: bytes, size: int | None = None) -> list[bytes]:
    """All-gather: send `data`, return what each of the `size` ranks sent, in rank order.

    `size` defaults to the variable FARANDOLE_SIZE. Raises ConnectionError when a rank has left,
    NotAll, naming the ranks that do not come within the connection's timeout.
    """
    if size is None:
        size = int(os.environ["FARANDOLE_SIZE"])
    try:
        connection.sendall(_LENGTH.pack(len(data)) + data)
        try:
            first = _receive_first(connection)
        except NotAll:
            raise
        except TimeoutError:
            connection.settimeout(_WHO_SECONDS)
            connection.sendall(_LENGTH.pack(_WHO))
            first = _receive_first(connection)
        return [first, *(_receive_record(connection) for _ in range(size - 1))]
    except ConnectionError as error:
        raise ConnectionError("the rendezvous was closed: another rank has left") from error


def _receive_first(connection: socket.socket) -> bytes:
    """The first record. Raises NotAll if the server names missing ranks instead."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length != _WHO:
        return _receive_exactly(connection, length)
    raise NotAll(_receive_record(connection).decode())


def _receive_record(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), _CHUNK))
        if not part:
            raise ConnectionError("end of stream")
        received += part
    return bytes(received)


class _Client:
    """One connection: bytes received so far, and the rank once it is known."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self._received = bytearray()

    def receive(self) -> bool:
        """Take in what has arrived; False when the client has left."""
        try:
            part = self.connection.recv(_CHUNK)
        except OSError:
            return False
        self._received += part
        if self.rank is None and len(self._received) >= _RANK.size:
            (self.rank,) = _RANK.unpack(self._take(_RANK.size))
        return bool(part)

    def has_record(self) -> bool:
        if self.rank is None or len(self._received) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._received)
        return len(self._received) >= _LENGTH.size + int(length)

    def asks_who(self) -> bool:
        """Whether it asks, behind its record, who is missing; it will not ask again."""
        if not self.has_record() or self.rank is None:
            return False
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        asks = self._received[end : end + _LENGTH.size] == _LENGTH.pack(_WHO)
        if asks:
            del self._received[end : end + _LENGTH.size]
        return asks

    def take_record(self) -> bytes:
        """One whole record, its length included."""
        (length,) = _LENGTH.unpack_from(self._received)
        return self._take(_LENGTH.size + length)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


class RendezvousServer:
    """The launcher's side: one thread, a context manager. `path` is where ranks connect."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds = 0  # exchanges completed since the start
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-")  # mode 0700
        self.path = str(Path(self._folder.name) / "rendezvous")
        self._clients: list[_Client] = []
        self._selector = DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(size)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._listener, EVENT_READ)
        self._selector.register(self._wake_reader, EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables by which a process finds this server and knows its place."""
        return {
            "FARANDOLE_RENDEZVOUS": f"unix:{self.path}",
            "FARANDOLE_RANK": str(rank),
            "FARANDOLE_SIZE": str(self.size),
        }

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._wake_writer.close()
        self._thread.join()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._folder.cleanup)
            cleanup.callback(self._selector.close)
            cleanup.callback(self._wake_reader.close)
            cleanup.callback(self._listener.close)
            cleanup.callback(self._drop_all)
            while self._step():
                pass

    def _step(self) -> bool:
        ready = {key.fileobj: key.data for key, _ in self._selector.select()}
        if self._wake_reader in ready:
            return False
        for client in ready.values():
            if client in self._clients and not self._receive(client):
                self._drop_all()
        if self._listener in ready:  # last: who reconnects has left the old generation before
            self._accept()
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SEND_TIMEOUT)
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, EVENT_READ, client)

    def _receive(self, client: _Client) -> bool:
        """Take in one client's bytes and finish the round if it was the last; False: start over."""
        if not client.receive():
            return False
        by_rank = {c.rank: c for c in self._clients if c.rank is not None}
        known = [c for c in self._clients if c.rank is not None]
        if len(by_rank) < len(known) or any(rank >= self.size for rank in by_rank):
            return False  # two of one rank, or a rank that does not exist
        if len(by_rank) < self.size or not all(c.has_record() for c in known):
            return not client.asks_who() or self._name_missing(by_rank)
        answer = b"".join(by_rank[rank].take_record() for rank in range(self.size))
        self.rounds += 1
        reached = [_send(client.connection, answer) for client in known]
        return all(reached)

    def _name_missing(self, by_rank: dict[int, _Client]) -> bool:
        """To all that wait: one of them has waited long enough."""
        here = {rank: client for rank, client in by_rank.items() if client.has_record()}
        text = ", ".join(f"rank {rank}" for rank in range(self.size) if rank not in here).encode()
        answer = _LENGTH.pack(_WHO) + _LENGTH.pack(len(text)) + text
        reached = [_send(client.connection, answer) for client in here.values()]
        return all(reached)

    def _drop_all(self) -> None:
        for client in self._clients:
            self._selector.unregister(client.connection)
            client.connection.close()
        self._clients.clear()


def _send(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True
