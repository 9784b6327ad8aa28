# SPDX-License-Identifier: Apache-2.0
"""What came of a job: what its ranks have told, what has happened to it, and how it has ended."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Listener", "Outcome", "Told"]


@dataclass(frozen=True)
class Told:
    """What a rank has told; `pid` is from the kernel."""

    at: float
    pid: int
    rank: int
    what: str  # begin, step, done, end, error
    words: dict[str, Any]


@dataclass
class Outcome:
    """What came of a job."""

    told: list[Told] = field(default_factory=list)
    happened: list[tuple[float, str]] = field(default_factory=list)
    victims: set[int] = field(default_factory=set)  # processes that were killed, stopped, hang
    hung: str = ""  # stacks, if it had not ended in time
    left: str = ""  # what it has left behind
    code: int | None = None  # of the launcher or supervisor; None: it was killed
    out: str = ""
    last: float = 0.0  # when the last fault began or ended

    def of(self, rank: int, *whats: str) -> list[Told]:
        """What a rank has told of these kinds."""
        return [told for told in self.told if told.rank == rank and told.what in whats]

    def story(self) -> str:
        """All of it, in order."""
        start = min([at for at, _ in self.happened] + [told.at for told in self.told], default=0.0)
        lines = [(at, text) for at, text in self.happened]
        for told in self.told:
            words = {name: word for name, word in told.words.items() if name != "seen"}
            lines.append((told.at, f"rank {told.rank} ({told.pid}): {told.what} {words}"))
        return "\n".join(f"{at - start:8.3f} s  {text}" for at, text in sorted(lines))


class Listener:
    """Hears what ranks tell; `changed` is notified each time."""

    def __init__(self, path: Path, outcome: Outcome) -> None:
        self.changed = threading.Condition()
        self._outcome = outcome
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, extra, _, _ = self._socket.recvmsg(1 << 16, 256)
            if not data:
                return
            own = next(data for _, kind, data in extra if kind == socket.SCM_CREDENTIALS)
            pid = struct.unpack("=iII", own)[0]
            words = json.loads(data)
            told = Told(time.monotonic(), pid, words.pop("rank"), words.pop("what"), words)
            with self.changed:
                self._outcome.told.append(told)
                self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
