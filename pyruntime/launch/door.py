# SPDX-License-Identifier: Apache-2.0
"""The door of a process that starts ranks: a listener for those that know its key. One thread
accepts, and one serves each caller, who may be a stranger."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import TypeVar

_PATIENCE = 5.0  # seconds that a caller has to show that it knows the key
_PAUSE = 0.05  # seconds after an accept that failed
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_STRANGERS = 16  # who may wait at the door beside the ranks

D = TypeVar("D", bound="Door")


class Door(ABC):
    """The starting process's side, a context manager. One thread serves each rank."""

    def __init__(self, ranks: int, here: bool) -> None:
        """`here`: all ranks are on this host; else they connect by TCP. All must know the key."""
        self._secret = secrets.token_bytes(32)
        if here:
            name = f"farandole-{secrets.token_hex(8)}"  # abstract: there is no file, and no path
            self._listener = Listener(f"\0{name}", "AF_UNIX", backlog=ranks + _STRANGERS)
            self.address = f"@{name}"
        else:
            self._listener = Listener(("", 0), "AF_INET", backlog=ranks + _STRANGERS)
            self.address = f"{socket.getfqdn()}:{self._listener.address[1]}"
        self._closing = threading.Event()
        self._guests: list[threading.Thread] = []
        self._checks = threading.Thread(target=self._accept, name="door", daemon=True)
        self._checks.start()

    @property
    def key(self) -> str:
        """What the ranks must know, as text."""
        return self._secret.hex()

    def addresses(self) -> str:
        """`address` with the number of each network interface before the name, for ranks where
        the name is unknown."""
        host, colon, port = self.address.rpartition(":")
        return f"{','.join([*_numbers(), host])}:{port}" if colon else self.address

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            call(self.address).close()  # wakes the accepting thread, if it still runs
        self._checks.join(_PATIENCE)
        self._listener.close()

    def settle(self, seconds: float) -> None:
        """After the ranks have ended: waits for results under way, `seconds` for each at most."""
        for guest in list(self._guests):
            guest.join(seconds)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:  # it has hung up already, or this process has no descriptor left
                self._closing.wait(_PAUSE)
                continue
            if self._closing.is_set():
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
            with _limited(connection, _PATIENCE):  # until it has shown that it knows the key
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                rank = int(connection.recv())
            self._guests.append(threading.current_thread())
            self._welcome(connection, rank)

    @abstractmethod
    def _welcome(self, connection: Connection, rank: int) -> None:
        """Serves one rank, on a thread of its own. OSError and EOFError end that."""


@contextlib.contextmanager
def _limited(connection: Connection, seconds: float) -> Iterator[None]:
    """A context in which both ends read the connection's end once `seconds` are over."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the caller has, too
                other.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def call(address: str, secret: bytes | None = None) -> Connection:
    """A connection to a door."""
    host, colon, port = address.rpartition(":")
    return Client((host, int(port)) if colon else address.replace("@", "\0"), authkey=secret)


def _numbers() -> list[str]:
    """The IPv4 addresses of this host's interfaces, those of the host itself left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has none
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [number for number in found if not number.startswith("127.")]
