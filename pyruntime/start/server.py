# SPDX-License-Identifier: Apache-2.0
"""A server of one thread, which ranks call, whatever strangers do. For the rendezvous, and
processes that start ranks."""

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
from farandole.start.session import SECRET_BYTES, Session

_LEAST = 0.05  # seconds that a stranger has before it goes for another one, in the kernel too
_PAUSE = 0.05  # seconds until the next call is taken, if the system lacks the means to take one
_BACKLOG = 4096  # callers for whom the kernel keeps a place
_CHUNK = 1 << 18  # bytes to read or write at once
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_WAITED = struct.Struct("52xI")  # in tcp_info: milliseconds since the last words, or the call
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

S = TypeVar("S", bound="Server")


class Client:
    """A caller. It is a stranger until it has proved itself."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.connection, self.session = connection, session
        self.connected_at = time.monotonic()
        self.least = self.connected_at + _LEAST - _waited(connection)  # is kept until then

    @property
    def rank(self) -> int:
        """Which rank it is, when it has proved itself."""
        return self.session.rank


class Server:
    """Takes calls of ranks, which prove that they know its secret. A context manager. Methods that
    start with an underscore run on its thread."""

    expected = 0  # ranks that may call at once
    patience = 5.0  # seconds that a caller has until it has proved itself
    max_pending = 64  # callers that may be there without a proof, beside those that are expected

    def __init__(
        self, name: str, secret: bytes | None = None, path: str = "", here: bool = True
    ) -> None:
        """`name`: of the thread. `secret`: callers must know it; None: a new one. `path`: of the
        Unix socket, by default one at random in this user's folder; processes of other users are
        sent away there. Not `here`: callers of other hosts come by TCP. Raises OSError if `path` is
        taken, LibraryError where no Unix socket can be."""
        secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        path = path or sockets.path_of()
        self._secret, self.key = secret, secret.hex()
        listeners = [sockets.listen_at(path)]
        self.address = path  # as open_connection() takes it
        if not here:
            listeners.append(_tcp_listener())
            places = ",".join([path, *_numbers()])
            self.address = f"{places}:{listeners[1].getsockname()[1]}"
        self._listeners = listeners
        self._pending: dict[Client, None] = {}  # in the order of arrival
        self._clients: dict[Client, None] = {}
        self._accepts, self._resumes = False, 0.0  # whether calls are taken; when they are again
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for connection in (*self._listeners, self._wake_reader, self._wake_writer):
            not_inherited(connection)
        not_inherited(self._selector)
        self._selector.register(self._wake_reader, _READ)
        for listener in self._listeners:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hangs up on all and ends the thread."""
        self._wake_writer.close()
        if threading.current_thread() is not self._thread:  # which may collect garbage
            self._thread.join()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_soon(self, action: Callable[[], object]) -> None:
        """Has the server's thread call `action`; from any thread."""
        self._todo.put(action)
        with contextlib.suppress(OSError):  # enough wakes are under way, or the server is closed
            self._wake_writer.send(b"x")

    # ---- what a server is for

    def _admits(self, client: Client) -> bool:
        """True if a caller who has proved itself may come in as the rank that it says."""
        return True

    def _connected(self, client: Client) -> None:
        """A rank has come. ValueError and OSError, here and in _received(), end its connection."""
        return

    def _received(self, client: Client, message: bytes) -> None:
        """A rank has sent this."""
        raise ValueError("nobody asked for it")

    def _disconnected(self, client: Client) -> None:
        """A rank's connection has ended; not called when this closes."""
        return

    # ---- the loop

    def _serve(self) -> None:
        try:
            while self._step():
                pass
        finally:
            for client in [*self._pending, *self._clients]:
                self._forget(client)
            self._selector.close()
            for end in (*self._listeners, self._wake_reader):
                end.close()

    def _step(self) -> bool:
        """Does what is to do; False: the server is closed."""
        self._listen()
        ready = self._selector.select(self._time_left())
        for key, events in ready:  # first: whoever proves itself now is no stranger any more
            if isinstance(key.data, Client):
                self._transfer(key.data, events)
        now = time.monotonic()
        while self._pending and self._oldest().connected_at + self.patience <= now:
            self._forget(self._oldest())
        for key, _ in ready:  # last: one who calls again leaves first
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
        """The stranger that goes for another one: the oldest that is silent. If all have said their
        hello, any: the oldest would be one that is far away, as honest callers may be."""
        silent = (client for client in self._pending if not client.session.greeted)
        return next(silent, None) or random.choice([*self._pending])

    def _listen(self) -> None:
        """Takes calls, or leaves them to the kernel for a moment."""
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
        """Sets the options of a connection that has just been made."""
        connection.setblocking(False)

    def _transfer(self, client: Client, events: int) -> None:
        """Reads and writes what is possible."""
        if client not in self._pending and client not in self._clients:
            return  # it had to go a moment ago
        try:
            if events & _READ:
                data = client.connection.recv(_CHUNK)
                if not data:
                    raise EOFError
                messages = client.session.receive(data)
                if client.session.proved and client in self._pending:
                    if not self._admits(client):
                        raise ValueError("no rank of this job")
                    del self._pending[client]
                    self._clients[client] = None
                    self._flush(client)  # this end's proof, whatever comes of it
                    self._connected(client)
                for message in messages:
                    if client in self._clients:  # no earlier message has ended its connection
                        self._received(client, message)
            self._flush(client)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError):
            self._hang_up(client)

    def _flush(self, client: Client) -> None:
        """Writes what the system takes; the rest when it takes more."""
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
        """Closes one connection, without a word to anybody; once."""
        if client in self._pending or client in self._clients:
            self._pending.pop(client, None)
            self._clients.pop(client, None)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _send(self, client: Client, message: bytes) -> None:
        """Sends to a rank, now or when it reads; does nothing if it has gone."""
        if client in self._clients:
            client.session.send(message)
            try:
                self._flush(client)
            except OSError:
                self._hang_up(client)


def _tcp_listener() -> socket.socket:
    """One at any port, of both families where the host has them."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _numbers() -> list[str]:
    """The addresses that the core tells ranks of other hosts, in FARANDOLE_INTERFACE's networks."""
    return [line.split(" ")[1] for line in read_string(lib.farandole_addresses).splitlines()]


def _waited(connection: socket.socket) -> float:
    """The seconds that the kernel has kept a caller, or its last words: where many silent ones wait
    there, they are not kept for as long again, and one who has spoken is call_soon heard."""
    if connection.family == socket.AF_UNIX:
        return 0.0  # they are this user's
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITED.size)
    return int(_WAITED.unpack(info)[0]) / 1000.0
