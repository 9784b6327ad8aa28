# SPDX-License-Identifier: Apache-2.0
"""A server that ranks call: one thread, whatever strangers do. For the rendezvous and the doors of
processes that start ranks."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from farandole.start.line import is_of_this_user
from farandole.start.session import Frames, Session

_STRANGERS = 64  # callers beside the ranks that may be there without a proof; then the oldest goes
_CHUNK = 1 << 18  # bytes to read or write at once
_PAUSE = 0.05  # seconds after a call that the system lacks the means to take
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_LONGEST_RANK = 9  # digits
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

S = TypeVar("S", bound="Server")


class Guest:
    """A caller. It is a stranger until it has proved itself and said its rank."""

    def __init__(self, connection: socket.socket, frames: Frames, until: float) -> None:
        """`until`: when it has to go if it is a stranger still."""
        self.connection, self.frames, self.until = connection, frames, until
        self.rank = -1  # of a stranger


class Server(ABC):
    """A context manager. The methods that start with an underscore run on the server's thread."""

    patience = 5.0  # seconds that a caller has until it has said its rank

    def __init__(
        self, name: str, listeners: Sequence[socket.socket], ranks: int, secret: bytes | None
    ) -> None:
        """`name`: of the thread. `listeners` are the server's from now on. Without a `secret` they
        must be Unix sockets; at these, processes of other users are sent away in any case."""
        self._secret, self._most = secret, ranks + _STRANGERS
        self._strangers: dict[Guest, None] = {}  # in the order in which they came
        self._guests: dict[Guest, None] = {}
        self._todo: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, _READ)
        self._listeners = listeners
        for listener in listeners:
            listener.listen(self._most)
            listener.setblocking(False)
            self._selector.register(listener, _READ)
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

    def soon(self, action: Callable[[], object]) -> None:
        """Has the server's thread call `action`; from any thread."""
        self._todo.put(action)
        with contextlib.suppress(OSError):  # enough wakes are under way, or the server is closed
            self._wake_writer.send(b"x")

    # ---- what a server is for

    def _admits(self, rank: int) -> bool:
        """Whether a caller may be this rank."""
        return True

    @abstractmethod
    def _came(self, guest: Guest) -> None:
        """A rank has come. ValueError and OSError, here and in _heard(), end its connection."""

    @abstractmethod
    def _heard(self, guest: Guest, message: bytes) -> None:
        """A rank has sent this."""

    @abstractmethod
    def _gone(self, guest: Guest) -> None:
        """A rank's connection has ended; not called when the server closes."""

    def _send(self, guest: Guest, message: bytes) -> None:
        """Sends to a rank, now or when it reads; does nothing if it has gone."""
        if guest in self._guests:
            guest.frames.send(message)
            try:
                self._flush(guest)
            except OSError:
                self._hang_up(guest)

    # ---- the loop

    def _serve(self) -> None:
        try:
            while self._step():
                pass
        finally:
            for guest in [*self._strangers, *self._guests]:
                self._forget(guest)
            self._selector.close()
            for end in (*self._listeners, self._wake_reader):
                end.close()

    def _step(self) -> bool:
        """Does what is to do; False: the server is closed."""
        ready = self._selector.select(self._time_left())
        for key, events in ready:
            if isinstance(key.data, Guest):
                self._attend(key.data, events)
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers)).until <= now:
            self._forget(next(iter(self._strangers)))
        for key, _ in ready:  # last: one who calls again leaves first
            if key.fileobj is self._wake_reader:
                if not self._wake_reader.recv(_CHUNK):
                    return False
                while not self._todo.empty():
                    self._todo.get()()
            elif isinstance(key.fileobj, socket.socket) and key.data is None:
                self._accept(key.fileobj)
        return True

    def _time_left(self) -> float | None:
        oldest = next(iter(self._strangers), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as reason:
            if reason.errno in _SHORT:
                if self._strangers:
                    self._forget(next(iter(self._strangers)))
                else:
                    time.sleep(_PAUSE)
            return
        frames = Frames() if self._secret is None else Session(self._secret, caller=False)
        guest = Guest(connection, frames, time.monotonic() + self.patience)
        try:
            if connection.family == socket.AF_UNIX and not is_of_this_user(connection):
                raise PermissionError
            self._prepare(connection)
            self._selector.register(connection, _READ, guest)
        except OSError:
            connection.close()
            return
        self._strangers[guest] = None
        if len(self._strangers) > self._most:
            self._forget(next(iter(self._strangers)))

    def _prepare(self, connection: socket.socket) -> None:
        """Sets the options of a connection that has just been made."""
        connection.setblocking(False)

    def _attend(self, guest: Guest, events: int) -> None:
        """Reads and writes what is possible."""
        if guest not in self._strangers and guest not in self._guests:
            return  # it had to go a moment ago
        try:
            if events & _READ:
                data = guest.connection.recv(_CHUNK)
                if not data:
                    raise EOFError
                for message in guest.frames.receive(data):
                    self._take(guest, message)
            self._flush(guest)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError):
            self._hang_up(guest)

    def _take(self, guest: Guest, message: bytes) -> None:
        if guest in self._guests:
            self._heard(guest, message)
        elif guest in self._strangers:
            if not message.isdigit() or len(message) > _LONGEST_RANK:
                raise ValueError("no rank")
            if not self._admits(int(message)):
                raise ValueError("no rank of this job")
            del self._strangers[guest]
            guest.rank = int(message)
            self._guests[guest] = None
            self._came(guest)

    def _flush(self, guest: Guest) -> None:
        """Writes what the system takes; the rest when it takes more."""
        if guest not in self._strangers and guest not in self._guests:
            return
        outgoing = guest.frames.outgoing
        with contextlib.suppress(BlockingIOError):
            while outgoing:
                sent = guest.connection.send(outgoing[:_CHUNK])
                del outgoing[:sent]
        wanted = _READ | _WRITE if outgoing else _READ
        if self._selector.get_key(guest.connection).events != wanted:
            self._selector.modify(guest.connection, wanted, guest)

    def _hang_up(self, guest: Guest) -> None:
        known = guest in self._guests
        self._forget(guest)
        if known:
            self._gone(guest)

    def _forget(self, guest: Guest) -> None:
        """Closes one connection, without a word to anybody; once."""
        if guest in self._strangers or guest in self._guests:
            self._strangers.pop(guest, None)
            self._guests.pop(guest, None)
            self._selector.unregister(guest.connection)
            guest.connection.close()


def listen_at(path: str) -> socket.socket:
    """A Unix socket at `path`. Raises OSError if it is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener
