# SPDX-License-Identifier: Apache-2.0
"""The server of farandole.run(), which sends the work to the ranks and receives their results."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from farandole.start.server import Client, Server

# Environment variable that holds the key. Other users could see the key in a command line.
KEY = "FARANDOLE_RUN_KEY"


@dataclass(frozen=True)
class Outcome:
    """A rank's result: a pickled value, or a pickled exception with its traceback as text."""

    data: bytes
    failure: str = ""

    def encode(self) -> bytes:
        """Packs the outcome into one message."""
        return self.failure.replace("\0", "").encode(errors="replace") + b"\0" + self.data

    @classmethod
    def decode(cls, message: bytes) -> Outcome:
        """Reverses encode(). Does not unpickle the data."""
        failure, _, data = message.partition(b"\0")
        return cls(data, failure.decode())


class ResultServer(Server):
    """Context manager. Runs in the process that has called run()."""

    def __init__(self, ranks: int, work: bytes, here: bool) -> None:
        """`ranks` is the number of ranks, and `work` is sent to each of them.

        `here` is True if all ranks are on this host.
        """
        self.ranks = self.expected = ranks
        self._work = work
        self.here = set[int]()  # ranks that have connected
        self.outcomes: dict[int, Outcome] = {}  # by rank, in the order of arrival
        self.changed = threading.Condition()
        super().__init__("listener", here=here)

    def wait(self, seconds: float) -> None:
        """Waits for results in transit, for at most `seconds` per rank that is still connected.

        Call this once the ranks have ended.
        """
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
