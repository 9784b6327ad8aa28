# SPDX-License-Identifier: Apache-2.0
"""A client's connection to a Server, and a function that opens it.

Ranks and agents use it to reach the rendezvous, the agent, the supervisor and farandole.run().
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import time
from collections import deque
from typing import Any

from farandole.errors import printable
from farandole.start.forks import not_inherited
from farandole.start.session import Refused, Session
from farandole.trust import is_own_user

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_TIME = struct.Struct("ll")  # seconds, microseconds
_CHUNK = 1 << 18  # number of bytes to read or write at once
_SEND_SECONDS = 30.0  # by default, send() fails if the server does not read for so many seconds
_SECONDS = 30.0  # time limit in seconds to connect to a server, over all of the server's addresses
_ATTEMPT = 5.0  # seconds within which the server at one address must answer and prove itself
_PAUSES = (0.1, 0.3, 0.9)  # seconds between rounds over all addresses; the last value repeats


class Busy(ConnectionError):
    """The server has closed the connection without an answer. A flooded server does so."""


class Connection:
    """The client's end of a connection, and a context manager.

    Any thread may send, but only one thread may receive.
    """

    def __init__(
        self, connection: socket.socket, session: Session, seconds: float, send_seconds: float
    ) -> None:
        """Waits until the server has proved that it knows the secret.

        Raises TimeoutError after `seconds`, and OSError if the server closes the connection or
        fails the proof.
        """
        self._socket, self._session = connection, session
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._messages: deque[bytes] = deque()
        self._waiting: deque[bytes] = deque()
        self._turns = deque([True])  # empty while a call of send() sends
        connection.settimeout(send_seconds)
        deadline = time.monotonic() + seconds
        try:
            while not session.proved:
                connection.sendall(session.outgoing)
                session.outgoing.clear()
                self._read(deadline)
        except (EOFError, ConnectionResetError, BrokenPipeError) as reason:
            if not session.greeted:
                raise Busy(f"{reason}: perhaps too many clients call it") from reason
            raise Refused(f"{reason}: perhaps it has a different secret, or none") from reason

    def send(self, message: bytes) -> None:
        """Sends a message. If that fails, raises OSError and closes the connection.

        If the server has hung up, the connection stays open, and receive() still returns the
        messages that the server had sent before. A signal handler may call send() during another
        call of send(), which then sends both messages.
        """
        self._waiting.append(message)
        while self._waiting:
            turn: list[bool] = []
            try:
                try:
                    # A single call in C takes the turn and stores it, so no signal comes between.
                    turn.extend(map(deque.pop, (self._turns,)))
                except IndexError:  # another call is sending, and also sends this message
                    return
                while self._waiting:
                    outgoing = self._session.outgoing
                    self._session.send(self._waiting.popleft())
                    while outgoing:  # the time limit holds for each piece, so long messages fit
                        del outgoing[: self._socket.send(outgoing[:_CHUNK])]
            except ConnectionError:  # the server has hung up
                raise
            except OSError:
                self.close()
                raise
            finally:
                self._turns.extend(turn)

    def receive(self, seconds: float | None = None) -> bytes:
        """Returns the next message.

        Raises TimeoutError after `seconds`, unless it is None. Raises EOFError or OSError if the
        connection has ended.
        """
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
        self._messages += self._session.receive(data)

    def close(self) -> None:
        """Closes the connection. This ends a receive() in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def limit_calls(connection: socket.socket, seconds: int) -> None:
    """Limits the time in seconds that each blocking call on this socket may take."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(seconds, 0))


def is_of_this_user(local: socket.socket) -> bool:
    """Returns True if the kernel says that this user's process has the Unix socket's other end."""
    return is_own_user(_credentials(local)[1])


def process_of(local: socket.socket) -> int:
    """Returns the pid of the process that has connected to a Unix socket.

    The pid is that of this PID namespace, which may differ from the process's own os.getpid().
    Returns 0 if the process is not visible here.
    """
    return _credentials(local)[0]


def _credentials(local: socket.socket) -> tuple[int, int, int]:
    data = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(data)
    return process, user, group


def open_connection(
    address: str,
    secret: bytes,
    rank: int = 0,
    seconds: float = _SECONDS,
    send_seconds: float = _SEND_SECONDS,
) -> Connection:
    """Connects as `rank` to the server that knows `secret`.

    `address` has the form `/path,1.2.3.4,...:port`. It holds paths of Unix sockets on this host,
    and IP addresses for other hosts. Tries them in turn. While an address is busy or silent, tries
    again, for `seconds` in all. A send() fails if it makes no progress for `send_seconds`. Raises
    ConnectionError with the error of each address, and Refused if a server fails the proof.
    """
    places, port = _parts(address)
    if not secret and not is_here(address):
        raise PermissionError("without a secret the server must be on this host")
    until = time.monotonic() + seconds
    for attempt in itertools.count():
        reasons: list[str] = []
        kinds: set[type[OSError]] = set()
        for place in places:
            left = until - time.monotonic()
            if left <= 0 and reasons:
                break
            try:
                session, patience = Session(secret, rank), max(0.0, min(left, _ATTEMPT))
                return _call(place, port, session, patience, send_seconds)
            except OSError as reason:
                reasons.append(printable(f"{place}: {reason}"))
                kinds.add(type(reason))
        again = kinds & {Busy, TimeoutError} or (Refused in kinds and attempt < len(_PAUSES))
        left = until - time.monotonic()
        if left <= 0 or not again:
            break
        time.sleep(min(left, _PAUSES[min(attempt, len(_PAUSES) - 1)]))
    raise (Refused if Refused in kinds else ConnectionError)("; ".join(reasons))


def is_here(address: str) -> bool:
    """Returns True if the address has only Unix sockets. The kernel reports who listens there."""
    return all(place.startswith("/") for place in _parts(address)[0])


def _parts(address: str) -> tuple[list[str], str]:
    """Splits an address into its places and the port for places on other hosts."""
    head, colon, port = address.rpartition(":")
    return (head.split(","), port) if colon else ([address], "")


def _call(
    place: str, port: str, session: Session, seconds: float, send_seconds: float
) -> Connection:
    here = place.startswith("/")
    family, where = (socket.AF_UNIX, place) if here else _elsewhere(place, port)
    connection = not_inherited(socket.socket(family, socket.SOCK_STREAM))
    try:
        if here:  # uses a blocking socket, else connect() fails while the server's backlog is full
            limit_calls(connection, max(1, int(seconds)))
        else:
            connection.settimeout(seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.connect(where)
        except BlockingIOError:
            raise TimeoutError("it is silent") from None
        if here and not is_of_this_user(connection):
            raise PermissionError("another user's process listens there")
        return Connection(connection, session, seconds, send_seconds)
    except BaseException:
        connection.close()
        raise


def _elsewhere(number: str, port: str) -> tuple[int, Any]:
    """Returns the family and the socket address for a place on another host."""
    kind, flags = socket.SOCK_STREAM, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    family, *_, where = socket.getaddrinfo(number.encode(), port, type=kind, flags=flags)[0]
    if _is_own(family, number):  # a server on this host must be reached through its path
        raise PermissionError(
            "it is this host's own address, where others may listen (containers of one host need a "
            "common /tmp)"
        )
    return family, where


def _is_own(family: int, number: str) -> bool:
    """Returns True if `number` is an address of this host. Only such addresses can be bound."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((number, 0))
        return True
    return False
