# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of farandole.run() fetch their work and bring their results."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import socket
import threading
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType

__all__ = ["KEY", "Home", "Outcome", "pickled", "visit"]

KEY = "FARANDOLE_RUN_KEY"  # the variable by which ranks get the key, never an argument

_PATIENCE = 5.0  # seconds for a stranger who says nothing, at the end


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its pickled result, or its pickled exception and the traceback's text."""

    data: bytes
    failure: str = ""


def pickled(value: object) -> bytes:
    """By cloudpickle where it is installed: it takes functions of scripts and notebooks."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


class Home:
    """The starting process's side; threads serve the ranks. A context manager."""

    def __init__(self, ranks: int, work: bytes, here: bool) -> None:
        """`here`: all ranks are on this host; else they come by TCP. The key keeps others out."""
        self._secret = secrets.token_bytes(32)
        self.ranks, self._work = ranks, work
        if here:
            self._listener = Listener(family="AF_UNIX", backlog=ranks, authkey=self._secret)
            self.address = str(self._listener.address)
        else:
            self._listener = Listener(("", 0), "AF_INET", backlog=ranks, authkey=self._secret)
            self.address = f"{socket.getfqdn()}:{self._listener.address[1]}"
        self.here = set[int]()  # ranks that have come
        self.outcomes: dict[int, Outcome] = {}  # as they come
        self.changed = threading.Condition()
        self._closing = threading.Event()
        self._guests: list[threading.Thread] = []
        self._door = threading.Thread(target=self._accept, name="home", daemon=True)
        self._door.start()

    @property
    def key(self) -> str:
        """The value of KEY for the ranks."""
        return self._secret.hex()

    def __enter__(self) -> Home:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            _call(self.address).close()  # wakes the door; it may be gone, so nothing is waited for
        self._door.join(_PATIENCE)
        self._listener.close()

    def settle(self, seconds: float) -> None:
        """Once the ranks have ended: takes in what they have sent, for so long at most."""
        for guest in list(self._guests):
            guest.join(seconds)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # a stranger
            if self._closing.is_set():
                connection.close()
                return
            guest = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._guests.append(guest)
            guest.start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            rank = int(connection.recv())
            with self.changed:
                self.here.add(rank)
                self.changed.notify_all()
            connection.send_bytes(self._work)
            outcome = connection.recv()
            with self.changed:
                self.outcomes[rank] = outcome
                self.changed.notify_all()


def visit(address: str, key: str) -> Connection:
    """A rank's side: the connection by which it says its rank, gets its work, sends an Outcome."""
    return _call(address, bytes.fromhex(key))


def _call(address: str, secret: bytes | None = None) -> Connection:
    host, colon, port = address.rpartition(":")
    return Client((host, int(port)) if colon else address, authkey=secret)
