# SPDX-License-Identifier: Apache-2.0
"""Allgathers for ranks started without MPI, by a server: of rank 0 under torchrun, whose address
may be in torch's store, or of the launcher in tests.

Per round each rank sends its bytes; when all ranks have, each receives all of them in rank order. A
rank that has waited too long asks who is missing (null): the server answers all that wait with the
missing ranks as text, and these give up. When a rank leaves, the server closes all others, so none
waits forever; the ranks may then connect again as the next generation (shutdown and init in a
living process).

Both ends prove that they know a secret, which also tells one job from another. It is empty where
all ranks are on one host and the kernel says that the other end is a process of the same user.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from farandole.start.connection import Connection, limit_calls, open_connection
from farandole.start.server import Client, Server

_LOOK = 0.5  # seconds between two calls of `check`
_WHO_SECONDS = 5.0  # for the server to answer who is missing
_SECONDS, _SERVER_SECONDS = 30.0, 2  # to reach the server; until a rank that stops is dropped
_SERVER = "rank 0 (or the launcher, if it serves the rendezvous)"


class NotAll(TimeoutError):
    """Some ranks have not come in time; the text names them."""


def connect(address: str, rank: int, secret: bytes = b"", seconds: float = _SECONDS) -> Connection:
    """A line to the server, as `rank`. Raises as open_connection() does."""
    return open_connection(address, secret, rank, min(seconds, _SECONDS))


def exchange(
    line: Connection, data: bytes, seconds: float = 60.0, check: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Sends `data`; returns what each rank sent, in rank order.

    Raises ConnectionError when a rank has left, NotAll, naming the ranks, when some do not come
    within `seconds`, and what `check` raises, which is called now and then.
    """
    try:
        line.send(json.dumps(data.hex()).encode())
        answer = _answer(line, seconds, check)
        if answer is None:
            line.send(b"null")
            answer = _answer(line, _WHO_SECONDS, check)
    except (OSError, EOFError) as error:
        raise ConnectionError("the rendezvous was closed: another rank has left") from error
    if not isinstance(answer, list):
        raise NotAll(answer or _SERVER)
    return [bytes.fromhex(each) for each in answer]


def _answer(line: Connection, seconds: float, check: Callable[[], None]) -> Any:
    """The server's; None if it is not there in time."""
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
    """Rank 0's side, or the launcher's. A rank may be stopped when it calls: it has much time."""

    patience = 60.0

    def __init__(self, size: int, secret: bytes = b"", path: str = "", here: bool = True) -> None:
        """Listens for `size` ranks; the other arguments are those of Server."""
        self.size = self.expected = size
        self.rounds = 0  # exchanges completed since the start
        self._said: dict[int, str] = {}  # in this round, by rank
        super().__init__("rendezvous", secret, path, here)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that tell a process this server's address, its rank and the size."""
        return {
            "FARANDOLE_RENDEZVOUS": f"unix:{self.address}",
            "FARANDOLE_RANK": str(rank),
            "FARANDOLE_SIZE": str(self.size),
        }

    def _prepare(self, connection: socket.socket) -> None:
        """It blocks, for a moment: the last answer must not come before the others are sent."""
        connection.setblocking(True)
        limit_calls(connection, _SERVER_SECONDS)

    def _admits(self, client: Client) -> bool:
        return client.rank < self.size

    def _connected(self, client: Client) -> None:
        if [other.rank for other in self._clients].count(client.rank) > 1:
            raise ValueError("two say that they are this rank")  # so all hear of it

    def _received(self, client: Client, message: bytes) -> None:
        said = json.loads(message)
        if said is None:
            if client.rank in self._said:  # else the round has ended meanwhile
                missing = (rank for rank in range(self.size) if rank not in self._said)
                self._answer(", ".join(f"rank {rank}" for rank in missing))
            return
        self._said[client.rank] = said
        if len(self._said) == self.size:
            self.rounds += 1
            self._answer([self._said[rank] for rank in range(self.size)])
            self._said.clear()

    def _answer(self, answer: Any) -> None:
        """To all that wait, to rank 0 last: the server may be in its process, which may end at once
        then."""
        message = json.dumps(answer).encode()
        for client in sorted(self._clients, key=lambda client: -client.rank):
            if client.rank in self._said:
                self._send(client, message)

    def _disconnected(self, client: Client) -> None:
        self._said.clear()
        for other in list(self._clients):
            self._forget(other)
