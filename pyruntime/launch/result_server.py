# SPDX-License-Identifier: Apache-2.0
"""Server of farandole.run(): it sends ranks their work and receives their results."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from farandole.start.server import Client, Server

KEY = "FARANDOLE_RUN_KEY"  # variable with the key; command lines are visible to other users


@dataclass(frozen=True)
class Outcome:
    """Result of a rank: pickled value, or pickled exception and the text of its traceback."""

    data: bytes
    failure: str = ""

    def encode(self) -> bytes:
        """Packs it into one message."""
        return self.failure.replace("\0", "").encode(errors="replace") + b"\0" + self.data

    @classmethod
    def decode(cls, message: bytes) -> Outcome:
        """Inverse of encode(). Unpickles nothing."""
        failure, _, data = message.partition(b"\0")
        return cls(data, failure.decode())


class ResultServer(Server):
    """Runs in the process that called run(). A context manager."""

    def __init__(self, ranks: int, work: bytes, here: bool) -> None:
        """`ranks`: their number. `work`: sent to each. `here`: all ranks are on this host."""
        self.ranks = self.expected = ranks
        self._work = work
        self.here = set[int]()  # ranks that have connected
        self.outcomes: dict[int, Outcome] = {}  # by rank, in order of arrival
        self.changed = threading.Condition()
        super().__init__("listener", here=here)

    def wait(self, seconds: float) -> None:
        """Waits for results under way once the ranks have ended; at most `seconds` for each."""
        with self.changed:
            self.changed.wait_for(lambda: not self._clients, seconds * len(self._clients))

    def _connected(self, client: Client) -> None:
        with self.changed:
            self.here.add(client.rank)
            self.changed.notify_all()
        self._send(client, self._work)

    def _received(self, client: Client, message: bytes) -> None:
        with self.changed:
            self.outcomes[client.rank] = Outcome.decode(message)
            self.changed.notify_all()

    def _disconnected(self, client: Client) -> None:
        with self.changed:
            self.changed.notify_all()
