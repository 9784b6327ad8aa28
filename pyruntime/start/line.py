# SPDX-License-Identifier: Apache-2.0
"""A line to a server: a connection that carries messages, and how to find the server. For ranks,
whose servers are the rendezvous, the supervisor and farandole.run()."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from farandole.start.session import Frames, Session
from farandole.trust import is_own_user

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds
_CHUNK = 1 << 18  # bytes to read at once
_SEND_SECONDS = 30.0  # until a server that stops reading is given up
_ATTEMPT = 5.0  # seconds for one place of a server to answer, and to prove that it is the server
_ROUNDS = 3  # over all places: a server that is flooded by strangers may hang up at first
_PAUSE = 0.1  # seconds between two rounds


class Line:
    """One end of the connection: any thread sends, one receives. A context manager."""

    def __init__(self, connection: socket.socket, frames: Frames, seconds: float) -> None:
        """Waits for the other end's proof. Raises TimeoutError after `seconds`, OSError and
        EOFError if the other end hangs up or is not who it should be."""
        self._socket, self._frames = connection, frames
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._messages: deque[bytes] = deque()
        self._waiting: deque[bytes] = deque()
        self._sending = threading.Lock()
        connection.settimeout(_SEND_SECONDS)
        deadline = time.monotonic() + seconds
        while not frames.proved:
            connection.sendall(frames.outgoing)
            frames.outgoing.clear()
            self._read(deadline)

    def send(self, message: bytes) -> None:
        """Sends a message. Raises OSError; the line is closed then.

        A signal handler may call it in the middle of another call, which then sends both.
        """
        self._waiting.append(message)
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._frames.send(self._waiting.popleft())
                    self._socket.sendall(self._frames.outgoing)
                    self._frames.outgoing.clear()
            except OSError:
                self.close()
                raise
            finally:
                self._sending.release()

    def receive(self, seconds: float | None = None) -> bytes:
        """The next message. Raises TimeoutError after `seconds` (None: never), EOFError and OSError
        when the line has ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._messages:
            self._read(deadline)
        return self._messages.popleft()

    def _read(self, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._poll.poll(None if left is None else 1000.0 * left):
            raise TimeoutError("it is silent")
        data = self._socket.recv(_CHUNK)
        if not data:
            raise EOFError("it hung up")
        self._messages += self._frames.receive(data)

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def limit_calls(connection: socket.socket, seconds: int) -> None:
    """Limits how long each call of a connection may block."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, 0))


def is_of_this_user(local: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is; the kernel knows."""
    return is_own_user(_other_end(local)[1])


def pid_of_other_end(local: socket.socket) -> int:
    """The process of this user there; 0: it is another user's, or in another container."""
    return _other_end(local)[0] if is_of_this_user(local) else 0


def _other_end(local: socket.socket) -> tuple[int, int]:
    """Process and user."""
    data = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def connect_local(path: str, frames: Frames, seconds: float) -> Line:
    """A line to a Unix socket of this user. Raises as Line does, PermissionError if another user's
    process listens there."""

    def connected(connection: socket.socket) -> None:
        connection.settimeout(None)  # else a server with many callers at once would be an error
        limit_calls(connection, int(seconds))
        try:
            connection.connect(path)
        except BlockingIOError:
            raise TimeoutError("it is silent") from None
        if not is_of_this_user(connection):
            raise PermissionError("another user's process listens there")

    return _line(socket.AF_UNIX, connected, frames, seconds)


def _line(
    family: int, connected: Callable[[socket.socket], None], frames: Frames, seconds: float
) -> Line:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connected(connection)
        return Line(connection, frames, seconds)
    except BaseException:
        connection.close()
        raise


def reach(address: str, secret: bytes) -> Line:
    """A line to the server that knows `secret`, at any of the places of its address.

    They are separated by commas: `@name` is an abstract Unix socket on this host, all others are
    names or numbers of its host, before the colon and the port. Raises ConnectionError, with what
    happened at each place, within _ROUNDS * _ATTEMPT seconds for each.
    """
    head, colon, port = address.rpartition(":")
    places = head.split(",") if colon else [address]
    for _ in range(_ROUNDS):
        reasons, again = [], False
        for place in places:
            try:
                return _call(place, port, Session(secret, caller=True))
            except (TimeoutError, EOFError, ConnectionResetError) as reason:
                again = True
                reasons.append(f"{place}: {reason}")
            except OSError as reason:
                reasons.append(f"{place}: {reason}")
        if not again:
            break
        time.sleep(_PAUSE)
    raise ConnectionError("; ".join(reasons))


def _call(place: str, port: str, session: Session) -> Line:
    if place.startswith("@"):
        return connect_local("\0" + place[1:], session, _ATTEMPT)

    def connected(connection: socket.socket) -> None:
        number = socket.gethostbyname(place)
        if _is_own(number):  # the server is elsewhere, or else at its @name
            raise PermissionError("it is this host's own address, where others may listen")
        connection.connect((number, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    return _line(socket.AF_INET, connected, session, _ATTEMPT)


def _is_own(number: str) -> bool:
    """Whether it is an address of this host: only these can be bound."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((number, 0))
        return True
    return False
