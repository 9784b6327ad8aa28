# SPDX-License-Identifier: Apache-2.0
"""The server of farandole.run(), which sends ranks their work and receives their results."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from farandole.start.server import Client, Server

KEY = "FARANDOLE_RUN_KEY"  # variable with the key; other users could see a command line


@dataclass(frozen=True)
class Outcome:
    """Result of a rank: a pickled value, or a pickled exception and its traceback as text."""

    data: bytes
    failure: str = ""

    def encode(self) -> bytes:
        """Packs the outcome into one message."""
        return self.failure.replace("\0", "").encode(errors="replace") + b"\0" + self.data

    @classmethod
    def decode(cls, message: bytes) -> Outcome:
        """Reverses encode(). Unpickles nothing."""
        failure, _, data = message.partition(b"\0")
        return cls(data, failure.decode())


class ResultServer(Server):
    """Context manager. Runs in the process that has called run()."""

    def __init__(self, ranks: int, work: bytes, here: bool) -> None:
        """`ranks`: their number. `work`: sent to each. `here`: True if all are on this host."""
        self.ranks = self.expected = ranks
        self._work = work
        self.here = set[int]()  # ranks that have connected
        self.outcomes: dict[int, Outcome] = {}  # by rank, in order of arrival
        self.changed = threading.Condition()
        super().__init__("listener", here=here)

    def wait(self, seconds: float) -> None:
        """Once the ranks have ended, waits for results in transit, at most `seconds` for each."""
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
