# SPDX-License-Identifier: Apache-2.0
"""Watches the processes of this host's other ranks, through /proc, until they have connected.

Thus init() need not wait for a rank that has ended. A rank is a child of the launcher, and the
rank's initial environment has its number and the job's identity. If /proc is incomplete, as in
containers, with other users' processes or if a program overwrites its environment, dead ranks are
not found, and the wait has its usual limit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from farandole.errors import PeerError, ranks_text
from farandole.start import launchers
from farandole.start.launchers import TORCHRUN

_BIRTH = 5.0  # seconds within which a launcher starts all its processes
_PAUSE = 0.5  # seconds between two checks
_EXITING = 4  # PF_EXITING of the kernel
_JOB = launchers.names("job")


class Process(NamedTuple):
    """A process's entry in /proc."""

    state: str  # T means stopped, t stopped by a debugger, and Z and X ended
    flags: int  # the kernel's PF_ flags
    parent: int
    start: str  # clock ticks after boot

    @property
    def ended(self) -> bool:
        """True if the process is ending, or its parent has not asked for the exit code yet."""
        return self.state in "ZX" or bool(self.flags & _EXITING)


class Siblings:
    """The ranks of this job whose processes are visible in /proc."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 0.0
        self._seen: dict[int, tuple[int, str]] = {}  # pid and start time, by rank
        address = os.environ.get("FARANDOLE_RENDEZVOUS", "")
        found = launchers.launcher()
        self._variable = "FARANDOLE_RANK" if address else found.rank_variable
        self._own = _environment(os.getpid()) or {}
        here = found.place.get("LOCAL_WORLD_SIZE") == found.size and not address
        # If users set torchrun's variables themselves, they may start processes one after another.
        at_once = found is not TORCHRUN or "TORCHELASTIC_RUN_ID" in self._own
        self._expected = set(range(found.size)) if here and at_once else set[int]()
        self._launcher = self._find_launcher() if self._own.get(self._variable) else 0

    def _find_launcher(self) -> int:
        """Returns the pid of the launcher that has started this rank, or 0 if it is not found."""
        process = os.getpid()
        while (
            process
            and (_environment(process) or {}).get(self._variable) == (self._own[self._variable])
        ):
            found = stat(process)
            process = found.parent if found else 0
        return process

    def check(self) -> None:
        """Raises PeerError if a rank has ended before it connected. Reads /proc twice a second."""
        if self._launcher and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PAUSE
            if dead := self.dead():
                raise PeerError(died(dead))

    def dead(self) -> list[int]:
        """Returns the ranks that have ended, in ascending order."""
        found = self._dead(_listed) if self._launcher else []
        return self._dead(_children) if found else []  # lists are incomplete while they change

    def _dead(self, children: Callable[[int], Iterable[int]]) -> list[int]:
        present = self._look(children)
        if present is None:
            return []
        self._seen.update(present)
        dead = {rank for rank, (pid, start) in self._seen.items() if not _lives(pid, start)}
        if time.monotonic() > self._began + _BIRTH:
            dead |= self._expected - set(self._seen)
        return sorted(dead - set(present))

    def wait_for_birth(self) -> dict[int, int]:
        """Waits until all expected ranks have started.

        Returns the pids, by rank, of the other ranks that are visible. Raises PeerError if a rank
        has ended.
        """
        while True:
            if dead := self.dead():
                raise PeerError(died(dead))
            own = os.getpid()
            pids = {rank: pid for rank, (pid, _) in self._seen.items() if pid != own}
            visible = bool(self._seen)  # this rank sees at least itself
            if visible and self._expected <= set(self._seen):
                return pids
            if not visible and (not self._launcher or time.monotonic() > self._began + _PAUSE):
                return {}
            time.sleep(_PAUSE / 10)

    def _look(self, children: Callable[[int], Iterable[int]]) -> dict[int, tuple[int, str]] | None:
        """Returns pid and start time of living ranks, by rank, or None if they are not visible."""
        found = {}
        for pid in children(self._launcher):
            words = _environment(pid)
            process = stat(pid)  # read last, because an ending process loses its environment
            if process is None or process.ended:
                continue
            if not words:  # it cannot be read, or the process is just starting its program
                return None
            rank = words.get(self._variable, "")
            if rank.isdecimal() and all(words.get(k) == self._own.get(k) for k in _JOB):
                found[int(rank)] = pid, process.start
        return found


def died(ranks: list[int]) -> str:
    """Returns the text of the error about ranks that have ended."""
    return (
        f"init(): {ranks_text(ranks)} ended before coming to the rendezvous of all ranks; see the "
        "output of that process. Remedy: every rank must call init(), even one without data; "
        f"{launchers.ALONE}"
    )


def _listed(parent: int) -> Iterable[int]:
    """Returns the children of a process, from the kernel's list.

    If the kernel has no such list, looks at all processes.
    """
    lists = [*Path(f"/proc/{parent}/task").glob("*/children")]
    if not lists:
        return _children(parent)
    found: list[int] = []
    for path in lists:
        with contextlib.suppress(OSError):  # that thread has ended
            found += map(int, path.read_text().split())
    return found


def _children(parent: int) -> Iterator[int]:
    """Yields the children of a process. Finds them by looking at all processes."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            found = stat(int(path.name))
            if found is not None and found.parent == parent:
                yield int(path.name)


def stat(pid: int) -> Process | None:
    """Reads a process's entry in /proc. Returns None if there is no such process, or no /proc."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name may have been cut within a character.
        text = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode()
        fields = text.split()
        return Process(fields[0], int(fields[6]), int(fields[1]), fields[19])
    return None


def _lives(pid: int, start: str) -> bool:
    found = stat(pid)
    return found is not None and not found.ended and found.start == start


def _environment(pid: int) -> dict[str, str] | None:
    """Returns a process's initial environment. It is empty or None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word[1:])
