# SPDX-License-Identifier: Apache-2.0
"""The ranks' processes on the supervisor's own host: whether they are stopped, and their end where
nobody else ends them. For an attempt, on its thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from farandole.start.supervised import Whereabouts

_KILL_SECONDS = 10.0  # for the kernel to end a process, which may have much memory
_STOPPED = "T"  # by a signal; "t", under a debugger, is somebody's will


class LocalProcess:
    """A process of this host, or none if it is elsewhere."""

    def __init__(self, where: Whereabouts, longest_step: float) -> None:
        """`longest_step`: seconds that count at most between two calls of stopped_for(): when this
        process was stopped itself, so were others, perhaps with it."""
        own = Whereabouts.own()
        self._longest_step = longest_step
        self._pid = where.pid
        self._fd = -1
        self._stopped = 0.0  # seconds
        self._looked = time.monotonic()
        if where.space and (where.host, where.space) == (own.host, own.space):
            with contextlib.suppress(OSError):  # it has ended, or the kernel is too old
                self._fd = os.pidfd_open(where.pid)

    def stopped_for(self) -> float:
        """Seconds for which it has been stopped without a break, as far as was looked."""
        now = time.monotonic()
        step = min(now - self._looked, self._longest_step)
        self._looked = now
        self._stopped = self._stopped + step if self._is_stopped() else 0.0
        return self._stopped

    def _is_stopped(self) -> bool:
        if not self.lives():
            return False
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
            state = stat.rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state == _STOPPED

    def lives(self) -> bool:
        """Whether it is known to run, or to be stopped, on this host."""
        return self._fd >= 0 and not self._ended(0.0)

    def _ended(self, seconds: float) -> bool:
        """Whether it has ended within so many seconds."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def kill(self) -> None:
        """Ends it, stopped or not; returns when it has ended."""
        if self.lives():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
                self._ended(_KILL_SECONDS)

    def close(self) -> None:
        """Forgets it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
