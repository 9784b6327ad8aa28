# SPDX-License-Identifier: Apache-2.0
"""A process that joins an elastic job under ULFM: it waits until the ranks take it in. For elastic
training, on its thread; start/recruits.py, the side of the rank that starts it, speaks its words.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from farandole.errors import LibraryError
from farandole.start.mpi_waits import LONGEST_PAUSE

JOINS = "FARANDOLE_JOINS"  # set for a process that joins: its token
TAG, _LEADERS_TAG = 29_425, 29_426
HERE, COME, WELCOME, AWAY = "here", "come", "welcome", "away"  # what the two tell each other

_token = os.environ.pop(JOINS, "")
_joins = bool(_token)  # taken away: its children do not join
_grown = _joins  # whether this process has been in one MPI world with processes that have joined


def joins() -> bool:
    """Whether this process was started to join a job that runs, and has not done so yet."""
    return _joins


def grown() -> bool:
    """Whether MPI_Finalize may hang in this process, once another one has died."""
    return _grown


def take_in(mpi: Any, comm: Any, sponsors: Sequence[int], pairs: Sequence[Any]) -> Any:
    """The communicator with a process more for each entry of `sponsors`, the ranks that have
    started them; collective. `pairs`: with this rank's own, in their order.

    If a rank dies meanwhile, all raise, for the first that does revokes what the others wait in.
    """
    global _grown
    own = iter(pairs)
    for place, sponsor in enumerate(sponsors):
        pair, both = comm, None
        try:
            if comm.Get_rank() == sponsor:
                pair = next(own)
                pair.send((COME, list(sponsors[place + 1 :])), 1, TAG)
            both = comm.Create_intercomm(sponsor, pair, 1, _LEADERS_TAG)
            comm = both.Merge(False)
        except mpi.Exception:
            for stuck in filter(None, (comm, both)):
                stuck.Revoke()
            raise
    _grown = _grown or bool(sponsors)
    return comm


def new_token() -> str:
    """What a process is given that shall join, to find the rank that starts it."""
    return f"{_place()} {secrets.token_hex(8)}"


def _place() -> str:
    """The kernel and the network that this process is in: there sockets without a file are seen."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


def address(token: str) -> str:
    """Of the socket, without a file, at which the rank that starts a process is seen to live."""
    return f"\0farandole-joins {token.removeprefix(_place())}"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context in which a process that joins waits for MPI. The kernel ends it when time is up, by
    SIGALRM, and when the rank that has started it dies on the same host, by SIGIO: mpirun makes no
    exit code of these. No code of Python could, since MPI_Init keeps the interpreter's lock."""
    ours = [n for n in (signal.SIGALRM, signal.SIGIO) if signal.getsignal(n) is signal.SIG_DFL]
    if not _joins or len(ours) < 2:
        yield
        return
    with socket.socket(socket.AF_UNIX) as line:
        if _token.startswith(_place()):
            fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(line, fcntl.F_SETFL, os.O_ASYNC)
            try:
                line.connect(address(_token))
            except OSError:  # it has died
                os.kill(os.getpid(), signal.SIGIO)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def come(mpi: Any, seconds: float) -> None:
    """Lets the rank that has started this process know of it; once."""
    global _joiner
    if _joiner is None:
        with limited(seconds):
            _joiner = _Joiner(mpi)


def join(seconds: float) -> tuple[Any, list[int], int]:
    """Waits until the job's ranks take this process in: see _Joiner.join()."""
    if _joiner is None:
        raise Away("init() has not been called")
    return _joiner.join(seconds)


class Away(Exception):
    """The job needs no further rank, or the rank that has started this one has died."""


class _Joiner:
    """What a process that joins has of the job, until it is a rank of it."""

    def __init__(self, mpi: Any) -> None:
        """Returns when the rank that has started it knows of it."""
        self._mpi = mpi
        parent = mpi.Comm.Get_parent()
        if parent == mpi.COMM_NULL:
            raise LibraryError(f"{JOINS} is set, but no rank of a job has started this process")
        self._pair = parent.Merge(True)

    def join(self, seconds: float) -> tuple[Any, list[int], int]:
        """Waits until the ranks take it in; returns their communicator, their ranks in it in the
        world's order, and the number of their commit. Raises Away. `seconds`: for MPI's part."""
        global _joins
        try:
            self._pair.send((HERE, None), 0, TAG)
            sponsors = self._hear(COME)
            with limited(seconds):
                alone = self._mpi.COMM_SELF.Create_intercomm(0, self._pair, 0, _LEADERS_TAG)
                comm = take_in(self._mpi, alone.Merge(True), sponsors, [])
                members, commits = self._hear(WELCOME)
        except self._mpi.Exception as reason:
            raise Away(str(reason)) from reason
        _joins = False
        return comm, members, commits

    def _hear(self, expected: str) -> Any:
        while not self._pair.Iprobe(0, TAG):
            time.sleep(LONGEST_PAUSE)
        word, what = self._pair.recv(source=0, tag=TAG)
        if word != expected:
            raise Away("the job needs no further rank")
        return what


_joiner: _Joiner | None = None
