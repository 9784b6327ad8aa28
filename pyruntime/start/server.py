# SPDX-License-Identifier: Apache-2.0
"""A server for ranks, in one thread. It keeps working, whatever unauthenticated callers do.

The rendezvous, the supervisor, agents and farandole.run() use it.
"""

from __future__ import annotations

import contextlib
import errno
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from farandole._library import lib, read_string
from farandole.start import sockets
from farandole.start.connection import is_of_this_user
from farandole.start.forks import not_inherited
from farandole.start.owners import start_owner
from farandole.start.session import SECRET_BYTES, Session

_LEAST = 0.05  # seconds, including time in the kernel, before a pending client may be dropped
_PAUSE = 0.05  # seconds without accept() after the system has run out of descriptors or memory
_BACKLOG = 4096  # backlog of each listener
_CHUNK = 1 << 18  # number of bytes to read or write at once
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_WAITED = struct.Struct("52xI")  # milliseconds since data or the connection arrived, in tcp_info
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

S = TypeVar("S", bound="Server")


class Client:
    """A client's connection. It is pending until the client has proved that it knows the secret."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.connection, self.session = connection, session
        self.connected_at = time.monotonic()
        # The server keeps the client at least until this time.
        self.least = self.connected_at + _LEAST - _waited(connection)

    @property
    def rank(self) -> int:
        """The rank that the client has named. Valid once the client has proved itself."""
        return self.session.rank


class Server:
    """Context manager that accepts clients which prove that they know the server's secret.

    Methods whose names start with an underscore run on the server's thread. Other methods may be
    called from any thread.

    States of a client:

        pending     when the proof arrives and _admits() agrees: connected; calls _connected()
                    when `patience` is over, or `max_pending` is exceeded: dropped
        connected   when a message arrives: calls _received()
                    when the connection ends, or _received() raises: dropped; calls _disconnected()
    """

    expected = 0  # number of ranks that may connect at once
    patience = 5.0  # seconds within which a client must prove itself
    max_pending = 64  # largest number of pending clients beyond the expected ones

    def __init__(
        self, name: str, secret: bytes | None = None, path: str = "", here: bool = True
    ) -> None:
        """Starts the server.

        `name` is the name of the thread. If `secret` is None, the server creates a new secret.
        `path` is the path of the Unix socket, by default a random path in this user's folder. The
        socket refuses processes of other users. Unless `here` is True, the server also listens on a
        TCP port for other hosts. Raises OSError if `path` is taken, and LibraryError if no Unix
        socket is possible.
        """
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        path = path or sockets.path_of()
        self._secret, self.key = secret, secret.hex()
        self._pending: dict[Client, None] = {}  # in the order of arrival
        self._clients: dict[Client, None] = {}
        # If the server does not accept clients now, _resumes is the time when it does again.
        self._accepts, self._resumes = False, 0.0
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        with contextlib.ExitStack() as opened:
            self._listeners = [opened.enter_context(sockets.listen_at(path))]
            self.address = path  # in the form that open_connection() takes
            if not here:
                self._listeners.append(opened.enter_context(_tcp_listener()))
                places = ",".join([path, *_numbers()])
                self.address = f"{places}:{self._listeners[1].getsockname()[1]}"
            ends = map(opened.enter_context, socket.socketpair())
            self._wake_reader, self._wake_writer = ends
            self._wake_reader.setblocking(False)
            self._wake_writer.setblocking(False)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            for connection in (*self._listeners, self._wake_reader, self._wake_writer):
                not_inherited(connection)
            not_inherited(self._selector)
            self._selector.register(self._wake_reader, _READ)
            for listener in self._listeners:
                listener.listen(_BACKLOG)
                listener.setblocking(False)
            self._opened = opened.pop_all()
        try:
            self._thread = start_owner(name, self._serve, self._opened.close)
        except BaseException:
            self._wake_writer.close()
            raise

    def close(self) -> None:
        """Closes all connections and ends the thread."""
        self._wake_writer.close()
        # The server's thread calls this if it runs the garbage collector.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Runs `action` on the server's thread."""
        self._todo.put(action)
        with contextlib.suppress(OSError):  # the pipe is full, or the server is closed
            self._wake_writer.send(b"x")

    # ---- overridden by servers

    def _admits(self, client: Client) -> bool:
        """Returns True if a client that has proved itself may connect with its rank."""
        return True

    def _connected(self, client: Client) -> None:
        """Called when a client connects.

        If this method or _received() raises ValueError or OSError, the connection ends.
        """
        return

    def _received(self, client: Client, message: bytes) -> None:
        """Called with each message of a connected client."""
        raise ValueError("unexpected message")

    def _disconnected(self, client: Client) -> None:
        """Called when a connection has ended, unless close() has ended it."""
        return

    # ---- the loop

    def _serve(self) -> None:
        try:
            while self._step():
                pass
        finally:
            for client in [*self._pending, *self._clients]:
                self._forget(client)
            self._opened.close()

    def _step(self) -> bool:
        """Runs one round of the loop. Returns False once the server is closed."""
        self._listen()
        ready = self._selector.select(self._time_left())
        for key, events in ready:  # first, so that a client that proves itself now is not dropped
            if isinstance(key.data, Client):
                self._transfer(key.data, events)
        now = time.monotonic()
        while self._pending and self._oldest().connected_at + self.patience <= now:
            self._forget(self._oldest())
        for key, _ in ready:  # last, so that a returning client's old connection ends first
            if key.fileobj is self._wake_reader:
                if not self._wake_reader.recv(_CHUNK):
                    return False
                while not self._todo.empty():
                    self._todo.get()()
            elif key.data is None and isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        return True

    def _oldest(self) -> Client:
        return next(iter(self._pending))

    def _to_drop(self) -> Client:
        """Chooses the pending client to drop.

        It is the oldest client that has not sent anything. If there is none, it is a random client,
        because the oldest client may be an honest one that is far away.
        """
        silent = (client for client in self._pending if not client.session.greeted)
        return next(silent, None) or random.choice([*self._pending])

    def _listen(self) -> None:
        """Registers the listeners. Unregisters them while new clients must wait in the kernel."""
        accepts = self._resumes <= time.monotonic()
        if accepts == self._accepts:
            return
        self._accepts = accepts
        for listener in self._listeners:
            if accepts:
                self._selector.register(listener, _READ)
            else:
                self._selector.unregister(listener)

    def _time_left(self) -> float | None:
        due = [] if self._accepts else [self._resumes]
        due += [self._oldest().connected_at + self.patience] if self._pending else []
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _accept(self, listener: socket.socket) -> None:
        if len(self._pending) >= self.max_pending + self.expected:
            client = self._to_drop()
            self._resumes = client.least
            if self._resumes > time.monotonic():
                return
            self._forget(client)
        try:
            connection, _ = listener.accept()
        except OSError as reason:
            if reason.errno in _SHORT:
                self._resumes = time.monotonic() + _PAUSE
                if self._pending:
                    self._forget(self._to_drop())
            return
        client = Client(not_inherited(connection), Session(self._secret))
        try:
            if connection.family == socket.AF_UNIX and not is_of_this_user(connection):
                raise PermissionError
            self._prepare(connection)
            self._selector.register(connection, _READ, client)
        except OSError:
            connection.close()
            return
        self._pending[client] = None

    def _prepare(self, connection: socket.socket) -> None:
        connection.setblocking(False)

    def _transfer(self, client: Client, events: int) -> None:
        """Reads and writes as much as possible without blocking."""
        if client not in self._pending and client not in self._clients:
            return  # it was dropped a moment ago
        try:
            if events & _READ:
                data = client.connection.recv(_CHUNK)
                if not data:
                    raise EOFError
                messages = client.session.receive(data)
                if client.session.proved and client in self._pending:
                    if not self._admits(client):
                        raise ValueError("its rank is not in this job")
                    del self._pending[client]
                    self._clients[client] = None
                    self._flush(client)  # this end's proof, before _connected() can fail
                    self._connected(client)
                for message in messages:
                    if client in self._clients:  # an earlier message may have ended the connection
                        self._received(client, message)
            self._flush(client)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError):
            self._hang_up(client)

    def _flush(self, client: Client) -> None:
        """Sends as much as the system takes now. The rest is sent later."""
        if client not in self._pending and client not in self._clients:
            return
        outgoing = client.session.outgoing
        with contextlib.suppress(BlockingIOError):
            while outgoing:
                sent = client.connection.send(outgoing[:_CHUNK])
                del outgoing[:sent]
        wanted = _READ | _WRITE if outgoing else _READ
        if self._selector.get_key(client.connection).events != wanted:
            self._selector.modify(client.connection, wanted, client)

    def _hang_up(self, client: Client) -> None:
        known = client in self._clients
        self._forget(client)
        if known:
            self._disconnected(client)

    def _forget(self, client: Client) -> None:
        """Closes a connection without calling _disconnected(). May be called again."""
        if client in self._pending or client in self._clients:
            self._pending.pop(client, None)
            self._clients.pop(client, None)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _send(self, client: Client, message: bytes) -> None:
        """Sends a message to a client. Does nothing if the client has disconnected."""
        if client in self._clients:
            client.session.send(message)
            try:
                self._flush(client)
            except OSError:
                self._hang_up(client)


def _tcp_listener() -> socket.socket:
    """Listens on any free port, for IPv4, and for IPv6 if the host has it."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _numbers() -> list[str]:
    """Returns this host's addresses for other hosts, in the networks of FARANDOLE_INTERFACE."""
    return [line.split(" ")[1] for line in read_string(lib.farandole_addresses).splitlines()]


def _waited(connection: socket.socket) -> float:
    """Returns the seconds that a client, or the client's last data, has waited in the kernel.

    They count towards _LEAST, so that a flood of silent clients delays honest clients less.
    """
    if connection.family == socket.AF_UNIX:
        return 0.0  # only processes of this user connect there
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITED.size)
    return int(_WAITED.unpack(info)[0]) / 1000.0
