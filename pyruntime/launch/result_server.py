# SPDX-License-Identifier: Apache-2.0
"""The server of farandole.run(): ranks fetch their work from it and send it their results. One
thread serves each."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from farandole.launch.door import Door, call

KEY = "FARANDOLE_RUN_KEY"  # the variable with the key; arguments would be visible to other users


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its pickled result, or its pickled exception and the traceback's text."""

    data: bytes
    failure: str = ""


class ResultServer(Door):
    """The starting process's side, a context manager."""

    def __init__(self, ranks: int, work: bytes, here: bool) -> None:
        """`here`: all ranks are on this host."""
        self.ranks, self._work = ranks, work
        self.here = set[int]()  # ranks that have connected
        self.outcomes: dict[int, Outcome] = {}  # by rank, in order of arrival
        self.changed = threading.Condition()
        super().__init__(ranks, here)

    def _welcome(self, connection: Connection, rank: int) -> None:
        with self.changed:
            self.here.add(rank)
            self.changed.notify_all()
        connection.send_bytes(self._work)
        outcome = connection.recv()
        with self.changed:
            self.outcomes[rank] = outcome
            self.changed.notify_all()


def visit(address: str, key: str) -> Connection:
    """A rank's connection: it sends its rank, receives its work, sends an Outcome."""
    return call(address, bytes.fromhex(key))
