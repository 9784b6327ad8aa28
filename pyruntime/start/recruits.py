# SPDX-License-Identifier: Apache-2.0
"""The processes that a rank of an elastic job starts under ULFM, that they become ranks of it. For
elastic training, on its thread; a thread `farandole.recruit` starts each of them.

MPI's calls that start them have no limit. A recruit that is late, or whose starter dies, is ended
(start/joining.py has its side); then these calls fail, as at any death.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farandole.config import setting
from farandole.start import joining, supervised

_LOOK = 0.05  # seconds between two looks at a process
_MOST_LOST = 3  # recruits that may fail, one after the other, before they are taken in
_LAST_GRACE = 10.0  # seconds for those that are not wanted any more to end by themselves
RECRUITS_SHARE = 0.5  # of the time in which ranks agree: then they go on without recruits
_folder = Path.cwd()  # in which the program was started; its path may be relative


class _Recruit:
    """A process that this rank starts."""

    def __init__(self, mpi: Any, seconds: float) -> None:
        """`seconds`: how long MPI may take to start it."""
        self._mpi = mpi
        self.pair: Any = None  # a communicator: 0 is this rank, 1 the process; None: not there yet
        self.error = ""  # why it can't join any more
        self._here = self._unwanted = self._told = False
        self._token = joining.new_token()
        self._line = socket.socket(socket.AF_UNIX)  # its end ends the process: joining.limited()
        self._line.bind(joining.address(self._token))
        self._line.listen()
        self._began, self._seconds = time.monotonic(), seconds
        self._late = float(setting("FARANDOLE_STALL_WARN"))
        self._lock = threading.Lock()
        # Threads may start several at once, each with a communicator of its own.
        alone = mpi.COMM_SELF.Dup()
        self._thread = threading.Thread(
            target=self._start, args=(alone,), name="farandole.recruit", daemon=True
        )
        self._thread.start()

    def _start(self, alone: Any) -> None:
        without = [word for name in (supervised.ADDRESS, supervised.KEY) for word in ("-u", name)]
        ours = [
            f"{k}={v}" for k, v in os.environ.items() if k.startswith(("FARANDOLE_", "HOROVOD_"))
        ]
        token = f"{joining.JOINS}={self._token}"
        words = [*without, *ours, token, sys.executable, *sys.orig_argv[1:]]
        info = self._mpi.Info.Create({"wdir": str(_folder)})
        try:
            pair = alone.Spawn("env", words, maxprocs=1, info=info).Merge(False)
        except self._mpi.Exception as reason:
            self.error = str(reason)
            return
        with self._lock:
            self.pair = pair
        if self._unwanted:
            self.tell(joining.AWAY)

    def ready(self) -> bool:
        """Whether it waits to be taken in; notices if it has ended, and ends it if it is late."""
        self._listen()
        if not self._here and not self.error:
            self.warn()
            if self.pair is None and time.monotonic() > self._began + self._seconds:
                self.kill()
                self.error = f"it did not come within {self._seconds:g} s"
        return self._here and not self.error

    def _listen(self) -> None:
        """Receives what it says: Open MPI 5.0.11 may hang where an end finds a message unread."""
        if self.pair is None or self.error:
            return
        try:
            while self.pair.Iprobe(1, joining.TAG):  # its MPI_Finalize needs these calls, too
                self._here = self.pair.recv(source=1, tag=joining.TAG)[0] == joining.HERE
        except self._mpi.Exception as reason:
            self.error = str(reason)

    def warn(self) -> None:
        """Says once what it waits for, if it has not come for FARANDOLE_STALL_WARN seconds."""
        late = self._late
        if self._told or not late or time.monotonic() < self._began + late:
            return
        self._told = True
        where = "its training function" if self.pair is not None else "init()"
        who, remedy = "it is on another host, or has ended", "look at its output"
        if pids := self._processes():
            who, remedy = f"process {pids[0]}", f"see `py-spy dump --pid {pids[0]}`"
            if _stopped(pids[0]):
                who, remedy = f"{who}, which a signal has stopped", f"kill -CONT {pids[0]}"
        _say(
            f"a process that was to join has not come to {where} within {late:g} s ({who}); "
            f"training goes on without it. Remedy: {remedy}; FARANDOLE_MAX_NP=0 starts none"
        )

    def tell(self, word: str, what: object = None) -> None:
        """Sends it a word, if it lives."""
        with contextlib.suppress(self._mpi.Exception):
            self.pair.send((word, what), 1, joining.TAG)

    def dismiss(self) -> None:
        """Lets it end, if it is not there yet as soon as it comes."""
        with self._lock:
            self._unwanted = True
            there = self.pair is not None
        if there:
            self.tell(joining.AWAY)

    def arrive(self, deadline: float) -> None:
        """Waits until it has come, failed, or been stopped."""
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.warn()
            if any(map(_stopped, self._processes())):
                return
            self._thread.join(_LOOK)

    def end(self, deadline: float) -> bool:
        """Waits until it has ended, and kills it if that takes too long, or if it is stopped;
        returns whether MPI has finished with it: only then may this process end MPI."""
        while not self._thread.is_alive() and time.monotonic() < deadline:
            pids = self._processes()
            if not pids or any(map(_stopped, pids)):
                break
            self._listen()
            time.sleep(_LOOK)
        killed = self.kill()  # MPI_Finalize may wait for one that was connected
        self._line.close()
        self._thread.join(_LOOK)
        return not self._thread.is_alive() and not killed

    def kill(self) -> bool:
        """Ends it, if it is on this host; returns whether it was there."""
        pids = self._processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def _processes(self) -> list[int]:
        """Its process, and those that it has forked; none if it is on another host."""
        return [pid for pid, words in _environments() if f"{joining.JOINS}={self._token}" in words]


def _environments() -> Iterator[tuple[int, list[str]]]:
    """Processes of this user and host, with the words that each was started with."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text(errors="replace").split("\0")


def end_all() -> None:
    """Ends all ranks of this job and host that have joined it, or shall."""
    ours = f"PMIX_NAMESPACE={os.environ.get('PMIX_NAMESPACE', '').rpartition('@')[0]}@"
    for pid, words in _environments():
        joins = any(word.startswith(f"{joining.JOINS}=") for word in words)
        if joins and pid != os.getpid() and any(word.startswith(ours) for word in words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


class Recruits:
    """The processes that this rank has started and that are not taken in yet."""

    def __init__(self, mpi: Any, seconds: float) -> None:
        """`seconds`: how long MPI may take to start one."""
        self._mpi, self._seconds = mpi, seconds
        self._all: list[_Recruit] = []
        self._coming: list[_Recruit] = []  # those that next_world() takes in
        self._dismissed: list[_Recruit] = []
        self._joined: list[_Recruit] = []
        self._lost = 0  # one after the other

    def tend(self, wanted: int) -> bool:
        """Starts what is missing of so many; returns whether one waits to be taken in."""
        ready = [each for each in self._all if each.ready()]
        for failed in [each for each in self._all if each.error]:
            self._all.remove(failed)
            self._dismissed.append(failed)
            self._lost += 1
            left = _MOST_LOST - self._lost
            _say(f"a process that was to join has failed, {left} more tries: {failed.error}")
        while len(self._all) < wanted and self._lost < _MOST_LOST:
            self._all.append(_Recruit(self._mpi, self._seconds))
        return bool(ready)

    def offer(self) -> int:
        """How many of them next_world() shall take in."""
        self._coming = [each for each in self._all if each.ready()]
        return len(self._coming)

    @property
    def pairs(self) -> list[Any]:
        """The communicators with those."""
        return [each.pair for each in self._coming]

    def settle(self, agreed: bool, world: tuple[list[int], int]) -> None:
        """Tells those whether they are ranks of this world now: its members, and its commit.

        If not, no more are started: in Open MPI 5.0.11 the end of a later one may hang the rank
        that has started it.
        """
        for recruit in self._coming:
            recruit.tell(joining.WELCOME if agreed else joining.AWAY, world)
            self._all.remove(recruit)
        # Kept: the end of a line ends a process that has not heard yet that it is a rank.
        self._joined += self._coming if agreed else []
        if not agreed:
            self._dismissed += self._coming
            if self._coming:
                _say("a rank died, or did not come, while new ones joined: no more are started")
        self._lost = 0 if agreed else _MOST_LOST
        self._coming = []

    def dismiss(self) -> None:
        """Lets all of them end, those that are on their way when they come."""
        for recruit in self._all:
            recruit.dismiss()
        self._dismissed += self._all
        self._all = []

    def abandon(self) -> None:
        """Ends those that next_world() takes in, if it takes too long: MPI's calls then fail."""
        for recruit in self._coming:
            recruit.kill()

    def close(self) -> bool:
        """Lets all of them end, and waits for that; returns whether MPI has finished with them."""
        self.dismiss()
        deadline = time.monotonic() + self._seconds
        for recruit in self._dismissed:
            recruit.arrive(deadline)
        deadline = time.monotonic() + _LAST_GRACE
        ended = [recruit.end(deadline) for recruit in self._dismissed]
        self._dismissed = []
        return all(ended)


def _say(text: str) -> None:
    print(f"farandole: {text}", file=sys.stderr, flush=True)
