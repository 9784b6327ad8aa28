# SPDX-License-Identifier: Apache-2.0
"""The processes of an attempt that run on the supervisor's own host: whether they are stopped, and
their end where nobody else ends them. For an attempt, on its thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from farandole.start.supervised import Whereabouts

_KILL_SECONDS = 10.0  # for the kernel to end a process, which may have much memory
_LONGEST_STEP = 2.0  # seconds between two looks that count: this process may have been stopped too
_STOPPED = "T"  # by a signal; "t", under a debugger, is somebody's will


class _Process:
    def __init__(self, pid: int) -> None:
        """Raises OSError where it has ended, or the kernel is too old."""
        self._fd = os.pidfd_open(pid)  # whoever gets its number later is another process
        self._pid = pid
        self.stopped = 0.0  # seconds, without a break

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
            return text.rpartition(")")[2].split()[0] == _STOPPED and not self.ended()
        except (OSError, IndexError):
            return False

    def kill(self) -> None:
        """Ends it, stopped or not; returns when it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            self.ended(_KILL_SECONDS)

    def close(self) -> None:
        """Forgets it."""
        os.close(self._fd)


class LocalProcesses:
    """Processes of this host, by name: "rank 3", "the launcher"."""

    def __init__(self) -> None:
        self._found: dict[str, _Process] = {}
        self._own = Whereabouts.own()
        self._looked = time.monotonic()

    def add(self, name: str, where: Whereabouts) -> None:
        """Notes where the process of that name is now; those of other hosts are left out."""
        if (before := self._found.pop(name, None)) is not None:
            before.close()
        if where.space and (where.host, where.space) == (self._own.host, self._own.space):
            with contextlib.suppress(OSError):
                self._found[name] = _Process(where.pid)

    def add_child(self, name: str, pid: int) -> None:
        """Likewise one that this process has started."""
        self.add(name, self._own._replace(pid=pid))

    def stopped(self, seconds: float) -> str:
        """The name of one that is stopped for so long; empty: there is none. To be called often."""
        now = time.monotonic()
        step = min(now - self._looked, _LONGEST_STEP)
        self._looked = now
        for process in self._found.values():
            process.stopped = process.stopped + step if process.is_stopped() else 0.0
        return next((n for n, process in self._found.items() if process.stopped >= seconds), "")

    def outliving(self, seconds: float) -> list[str]:
        """Names of those that do not end within so many seconds."""
        until = time.monotonic() + seconds
        found = self._found.items()
        return [name for name, x in found if not x.ended(max(0.0, until - time.monotonic()))]

    def kill(self) -> None:
        """Ends all, stopped or not; returns when they have ended. Then none is known."""
        for process in self._found.values():
            process.kill()
            process.close()
        self._found.clear()
