# SPDX-License-Identifier: Apache-2.0
"""The process of one rank of an elastic job. The agent uses it.

For each process, one thread copies the output, and another thread waits for the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from farandole.launch.programs import apart
from farandole.membership.messages import End
from farandole.start.siblings import Process, stat

_CHUNK = 1 << 16
_STOPPED = "T"  # stopped by a signal. "t" would mean stopped by a debugger, which is intended.
_writing = threading.Lock()


class RankProcess:
    """A child process, which the kernel kills when the thread that has started it ends.

    The agent sets the attributes.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        label: Callable[[], str],
        ended: Callable[[int], object],
    ) -> None:
        """`label` returns the prefix of output lines.

        `ended` is called on another thread with the exit code. Raises OSError if the process cannot
        be started.
        """
        self.slot = 0  # number of the process's slot on the host
        self.settled = False  # True once the end has been reported
        self.said: tuple[End, str] | None = None  # the end that the program has announced
        self.called = False  # True once a program of this process has called init()
        self.connected = False  # True while the program is connected to the agent
        self.code: int | None = None  # exit code, or None while the process lives
        self.stopped = 0.0  # number of seconds for which a signal has stopped the process
        self.pid = 0  # PID of the connected program, in this namespace; 0 if none is connected
        self._begun: Process | None = None  # the connected program's entry in /proc, read by meet()
        self._process = subprocess.Popen(
            apart(command, dies=True),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        pipes = {self._process.stdout: sys.stdout.buffer, self._process.stderr: sys.stderr.buffer}
        copier = threading.Thread(target=_copy, args=(pipes, label), name="output", daemon=True)

        def wait() -> None:
            code = self._process.wait()
            copier.join(1.0)  # children may keep the output open
            ended(code)

        try:
            copier.start()
            threading.Thread(target=wait, name="rank", daemon=True).start()
        except RuntimeError as reason:  # too many threads
            self.kill()
            self._process.wait()
            raise OSError(errno.EAGAIN, str(reason)) from reason

    def meet(self, pid: int) -> None:
        """Notes which program is connected. A `pid` of 0 means that the program has ended."""
        if pid != self.pid:
            self.pid, self._begun = pid, stat(pid)

    def kill(self) -> None:
        """Kills the process group, and the connected program.

        The program may be in another process group or in a container.
        """
        with contextlib.suppress(PermissionError):
            try:
                if not self.settled:  # afterwards another group may have the same number
                    os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # the group does not exist yet, or no longer
                self._process.kill()
        now = stat(self.pid) if self.pid else None
        # The program may have ended unnoticed, and another process may have the same number now.
        if now is not None and self._begun is not None and now.start == self._begun.start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def preempt(self) -> None:
        """Sends SIGTERM, because this host is being preempted."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid or self._process.pid, signal.SIGTERM)

    def is_stopped(self) -> bool:
        """True if a signal has stopped the process."""
        found = stat(self.pid or self._process.pid)
        return found is not None and found.state == _STOPPED

    def end(self) -> tuple[End, str]:
        """Returns the kind of the process's end, and a text about the end for the user."""
        code = self.code or 0
        if code < 0:
            return End.LOST, f"was killed by {_name_of(-code)}"
        if self.said is not None and self.said[0] in (End.FAILED, End.LOST):
            return self.said[0], f"failed: {self.said[1]}"
        if code and (self.said is not None or not self.called):
            before = "after its training" if self.called else "before it had called init()"
            return End.FAILED, f"ended with exit code {code} {before}"
        if self.said is not None:
            return self.said[0], ""
        if self.called:
            return End.LOST, f"ended with exit code {code}, without saying why"
        return End.WELL, ""


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _copy(pipes: Mapping[IO[bytes], IO[bytes]], label: Callable[[], str]) -> None:
    """Copies output in whole lines, so that the lines of several ranks do not mix."""
    with selectors.DefaultSelector() as selector:
        for pipe, stream in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, _Stream(stream))
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _CHUNK)
                key.data.put(data, label)
                if not data:
                    selector.unregister(key.fileobj)
    for pipe in pipes:
        pipe.close()


class _Stream:
    """Writes the output of one rank in whole lines. Holds back an unfinished line."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest = stream, b""

    def put(self, data: bytes, label: Callable[[], str]) -> None:
        """Writes the complete lines. If `data` is empty, also writes an unfinished line."""
        lines = (self._rest + data).splitlines(keepends=True)
        whole = not data or not lines or lines[-1].endswith(b"\n") or len(lines[-1]) > _CHUNK
        self._rest = b"" if whole else lines.pop()
        head = label().encode()
        with _writing, contextlib.suppress(OSError):  # if the reader has ended, the job continues
            self._stream.write(b"".join(head + line for line in lines))
            self._stream.flush()


def stamp(tag: str, time_too: bool) -> str:
    """Formats the prefix of an output line."""
    now = time.strftime("%a %b %d %H:%M:%S %Y") if time_too else ""
    return f"[{tag}]<{now}>: " if now else f"[{tag}]: " if tag else ""
