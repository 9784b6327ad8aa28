# SPDX-License-Identifier: Apache-2.0
"""A rank under `farandole run --elastic`: what it tells its supervisor, and whether it shall leave,
because of the supervisor or of a signal. For init(), elastic training and the end of the process.

A thread `farandole.supervisor` reads what the supervisor says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from farandole.errors import LibraryError
from farandole.start.launchers import launched_rank
from farandole.start.line import Line, reach

ADDRESS, KEY = "FARANDOLE_SUPERVISOR", "FARANDOLE_SUPERVISOR_KEY"  # set by the supervisor
LEAVE = b"leave"  # what the supervisor says
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # that announce a preemption


class What(Enum):
    """What a rank says."""

    HERE = "here"  # the text is a Whereabouts
    COMMITTED = "committed"
    DONE = "done"  # its program has ended well
    SIGNALLED = "signalled"  # a signal asks it to leave
    LEFT = "left"  # as it was asked to, and its state is on the disk
    FAILED = "failed"  # by an error of the program; the text says which
    BROKEN = "broken"  # by an error after which another attempt may succeed


class Said(NamedTuple):
    """One message of a rank."""

    what: What
    text: str = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps([self.what.value, self.text]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Said:
        """The inverse of encode(). Raises ValueError."""
        what, text = json.loads(message)
        return cls(What(what), str(text))


class Whereabouts(NamedTuple):
    """Where a process is."""

    host: str
    pid: int
    space: str  # of process numbers: two processes with equal host and space see each other's

    @classmethod
    def own(cls) -> Whereabouts:
        """This process's."""
        space = ""
        with contextlib.suppress(OSError):  # there is no /proc
            space = str(Path("/proc/self/ns/pid").readlink())
        return cls(socket.gethostname(), os.getpid(), space)

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.space}"

    @classmethod
    def parse(cls, text: str) -> Whereabouts:
        """The inverse of str()."""
        host, pid, space = text.split(" ")
        return cls(host, int(pid), space)


class _Line:
    """The connection to the supervisor, and whether this rank shall leave."""

    def __init__(self) -> None:
        self.connection: Line | None = None
        self.asked = False  # by the supervisor
        self.signalled = False
        self.left = False

    def listen(self, connection: Line) -> None:
        """Returns when the supervisor has asked this rank to leave, or has ended."""
        with contextlib.suppress(OSError, EOFError):
            connection.receive()
        self.asked = True


_line = _Line()


def connect() -> bool:
    """Connects to the supervisor; returns whether there is one. Raises LibraryError."""
    if _line.connection is not None:
        return True
    if ADDRESS not in os.environ:
        return False
    # Taken away: jobs that this rank may start are not the supervisor's.
    address, secret = os.environ.pop(ADDRESS), bytes.fromhex(os.environ.pop(KEY, ""))
    try:
        connection = reach(address, secret)
        connection.send(str(launched_rank()).encode())
        connection.send(Said(What.HERE, str(Whereabouts.own())).encode())
    except OSError as reason:
        raise LibraryError(
            f"init(): farandole run --elastic can't be reached ({reason}); remedy: it must still "
            "run; let TCP connections from this host to its host through; without it, start "
            f"without {ADDRESS}"
        ) from reason
    _line.connection = connection
    threading.Thread(
        target=_line.listen, args=(connection,), name="farandole.supervisor", daemon=True
    ).start()
    return True


def _tell(said: Said) -> None:
    if _line.connection is not None:
        with contextlib.suppress(OSError):  # it has ended
            _line.connection.send(said.encode())


def tell_commit() -> None:
    """Tells the supervisor that training has made progress."""
    _tell(Said(What.COMMITTED))


def tell_failure(cause: str, retried: bool) -> None:
    """Tells it that this rank fails; `retried`: another attempt may succeed."""
    _tell(Said(What.BROKEN if retried else What.FAILED, cause))


def tell_end() -> None:
    """Tells it that this rank's process ends well."""
    _tell(Said(What.LEFT if _line.left else What.DONE))


def shall_leave() -> bool:
    """Whether the supervisor, its end or a signal asks this rank to leave."""
    return _line.asked or _line.signalled


def note_leaving() -> None:
    """Notes that this process now ends because a rank was asked to leave."""
    _line.left = True


# ---- signals


@contextlib.contextmanager
def signals(grace: float | None) -> Iterator[None]:
    """A context in which signals of a preemption ask this rank to leave, instead of ending it.

    The process ends `grace` seconds after the first, if it has not by then; None: all is as ever.
    Where the program has handlers of its own these stay, and other threads than the main one can't
    have any.
    """
    if grace is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    owner = os.getpid()

    def handler(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a child that has hardly begun: see _after_fork
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if _line.signalled:
            return
        _line.signalled = True
        _tell(Said(What.SIGNALLED))
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            # The kernel ends it, whatever it does; 0 would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(grace, 0.001))
        name = signal.Signals(number).name
        when = f"at the next commit, within {grace:g} s"
        # Not by print(), in the middle of which the signal may have come.
        os.write(2, f"farandole: rank {launched_rank()} got {name}: it leaves {when}\n".encode())

    ours = [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
        _handled.add(number)
    try:
        yield
    finally:
        if not _line.signalled:  # else a second signal must not end it before it has left
            _undo_handlers(ours)


_handled: set[int] = set()


def _undo_handlers(numbers: Iterable[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
        _handled.discard(number)


def _after_fork() -> None:
    """A child, such as a worker of a DataLoader, ends by signals as ever; and the supervisor must
    see the end of the rank's connection when the rank ends."""
    if _line.connection is not None:
        _line.connection.close()
        _line.connection = None
    _undo_handlers(list(_handled))


os.register_at_fork(after_in_child=_after_fork)
