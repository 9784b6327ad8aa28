# SPDX-License-Identifier: Apache-2.0
"""Allgathers for ranks without MPI, through a server.

Under torchrun, the server runs in rank 0, and torch's store may hold the server's address. In
tests, the server runs in the launcher.

In each round, every rank sends its bytes, then receives the bytes of all ranks, in rank order. A
rank that has waited too long sends null. The server then answers all waiting ranks with a text that
names the missing ranks, and the waiting ranks give up. When a rank disconnects, the server tells
the other ranks which rank has left, and why if this is known. It then disconnects them, so that no
rank waits forever. They may connect again, if a living process calls shutdown() and init().

Both ends prove that they know a secret, which also distinguishes jobs. The secret is empty if all
ranks are on one host, where the kernel reports the user at the other end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from farandole.start.connection import Connection, limit_calls, open_connection
from farandole.start.server import Client, Server

_LOOK = 0.5  # seconds between two calls of `check`
_WHO_SECONDS = 5.0  # seconds within which the server must name the missing ranks
# Time limits in seconds to connect, and until the server drops a rank that does not read.
_SECONDS, _SERVER_SECONDS = 30.0, 2
_MOST_TEXT = 2000  # largest number of characters of a reason
_SERVER = "rank 0 (or the launcher, if it serves the rendezvous)"


class NotAll(TimeoutError):
    """Some ranks did not come in time. The error's text names them."""


def connect(address: str, rank: int, secret: bytes = b"", seconds: float = _SECONDS) -> Connection:
    """Connects to the server as `rank`. Raises the errors of open_connection()."""
    return open_connection(address, secret, rank, min(seconds, _SECONDS))


def exchange(
    line: Connection, data: bytes, seconds: float = 60.0, check: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Sends `data`. Returns the data of every rank, in rank order.

    `check` is called about twice a second. If it raises an error, the wait ends. Raises
    ConnectionError if a rank has left, and NotAll if ranks do not come within `seconds`.
    """
    try:
        _say(line, json.dumps(data.hex()).encode())
        answer = _answer(line, seconds, check)
        if answer is None:
            _say(line, b"null")
            answer = _answer(line, _WHO_SECONDS, check)
    except (OSError, EOFError) as error:
        raise ConnectionError(
            f"the rendezvous was closed: another rank has left, or {_SERVER} has ended; see its "
            "own output for the reason"
        ) from error
    if isinstance(answer, dict):
        why = answer["why"] or "see its own output for the reason"
        raise ConnectionError(f"rank {answer['left']} has ended or left: {why}")
    if not isinstance(answer, list):
        raise NotAll(answer or _SERVER)
    return [bytes.fromhex(each) for each in answer]


def leave(line: Connection, reason: BaseException) -> None:
    """Tells the other ranks why this rank leaves, then disconnects."""
    text = str(reason).removeprefix("init(): ") or type(reason).__name__
    with contextlib.suppress(OSError):
        line.send(json.dumps({"why": text[:_MOST_TEXT]}).encode())
    line.close()


def _say(line: Connection, message: bytes) -> None:
    """Sends a message. Ignores that the server has hung up, because its last answer tells why."""
    with contextlib.suppress(ConnectionError):
        line.send(message)


def _answer(line: Connection, seconds: float, check: Callable[[], None]) -> Any:
    """Returns the server's answer, or None if there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return json.loads(line.receive(min(left, _LOOK)))
        except TimeoutError:
            if left <= _LOOK:
                return None
        check()


class RendezvousServer(Server):
    """The server, which runs in rank 0 or in the launcher.

    A rank has a minute to prove itself, because the rank may be stopped while it connects.
    """

    patience = 60.0

    def __init__(self, size: int, secret: bytes = b"", path: str = "", here: bool = True) -> None:
        """Listens for `size` ranks. The other arguments are the same as those of Server."""
        self.size = self.expected = size
        self.rounds = 0  # number of complete rounds
        self._said: dict[int, str] = {}  # data of this round, by rank
        self._reasons: dict[Client, str] = {}  # reasons of clients that are about to leave
        super().__init__("rendezvous", secret, path, here)

    def environment(self, rank: int) -> dict[str, str]:
        """Returns variables for a rank's process: this server's address, the rank, and the size."""
        return {
            "FARANDOLE_RENDEZVOUS": f"unix:{self.address}",
            "FARANDOLE_RANK": str(rank),
            "FARANDOLE_SIZE": str(self.size),
        }

    def _prepare(self, connection: socket.socket) -> None:
        """Makes a connection blocking, with a short time limit, so that rank 0 is answered last."""
        connection.setblocking(True)
        limit_calls(connection, _SERVER_SECONDS)

    def _admits(self, client: Client) -> bool:
        return client.rank < self.size

    def _connected(self, client: Client) -> None:
        if [other.rank for other in self._clients].count(client.rank) > 1:
            raise ValueError("two clients claim this rank")  # all ranks are disconnected

    def _received(self, client: Client, message: bytes) -> None:
        said = json.loads(message)
        if isinstance(said, dict):
            self._reasons[client] = str(said["why"])
            return
        if said is None:
            if client.rank in self._said:  # otherwise the round is complete already
                missing = (rank for rank in range(self.size) if rank not in self._said)
                self._answer(", ".join(f"rank {rank}" for rank in missing))
            return
        self._said[client.rank] = said
        if len(self._said) == self.size:
            self.rounds += 1
            self._answer([self._said[rank] for rank in range(self.size)])
            self._said.clear()

    def _answer(self, answer: Any) -> None:
        """Answers all waiting ranks, rank 0 last.

        The server may run in rank 0's process, which may end as soon as rank 0 has its answer.
        """
        message = json.dumps(answer).encode()
        for client in sorted(self._clients, key=lambda client: -client.rank):
            if client.rank in self._said:
                self._send(client, message)

    def _disconnected(self, client: Client) -> None:
        self._said.clear()
        why = self._reasons.get(client, "")
        self._reasons.clear()
        news = json.dumps({"left": client.rank, "why": why}).encode()
        for other in list(self._clients):
            other.session.send(news)
            with contextlib.suppress(OSError):
                self._flush(other)
            self._forget(other)
