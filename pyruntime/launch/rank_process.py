# SPDX-License-Identifier: Apache-2.0
"""The process of one rank of an elastic job, and what comes of its output. For an agent; two
threads of each process copy its output and wait for its end."""

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
from farandole.start.siblings import stat

_CHUNK = 1 << 16
_STOPPED = "T"  # by a signal; "t", under a debugger, is somebody's will
_writing = threading.Lock()


class RankProcess:
    """It dies with the thread that has started it, and is killed with all that it has started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        label: Callable[[], str],
        ended: Callable[[int], object],
    ) -> None:
        """`label`: the prefix of output lines. `ended` is called with the exit code, on a thread.
        Raises OSError if the process can't be started."""
        self.slot = 0  # of its host
        self.settled = False  # whether all is known of its end
        self.said: tuple[End, str] | None = None  # how it ends, as it says
        self.called = False  # whether a program in it has called init()
        self.connected = False  # and has not left since
        self.code: int | None = None  # it has ended so
        self.stopped = 0.0  # seconds, without a break
        self.pid = 0  # of the program that has called; 0: none has
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
            copier.join(1.0)  # what it has started may hold its output open
            ended(code)

        try:
            copier.start()
            threading.Thread(target=wait, name="rank", daemon=True).start()
        except RuntimeError as reason:  # of too many threads
            self.kill()
            self._process.wait()
            raise OSError(errno.EAGAIN, str(reason)) from reason

    def kill(self) -> None:
        """Ends it, and all of its process group."""
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not made its group yet, or is gone
                self._process.kill()

    def preempt(self) -> None:
        """Tells its program that this host will be taken away."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self._process.pid, signal.SIGTERM)

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        found = stat(self.pid or self._process.pid)
        return found is not None and found.state == _STOPPED

    def end(self) -> tuple[End, str]:
        """How it has ended, with a text."""
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
            return End.LOST, f"ended without a word, with exit code {code}"
        return End.WELL, ""


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _copy(pipes: Mapping[IO[bytes], IO[bytes]], label: Callable[[], str]) -> None:
    """Copies whole lines, so that those of several ranks do not mix."""
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
    """Writes the output of ranks, and keeps a line that one of them has not finished."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest = stream, b""

    def put(self, data: bytes, label: Callable[[], str]) -> None:
        """Writes the lines that are whole; all, if there is no more data."""
        lines = (self._rest + data).splitlines(keepends=True)
        whole = not data or not lines or lines[-1].endswith(b"\n") or len(lines[-1]) > _CHUNK
        self._rest = b"" if whole else lines.pop()
        head = label().encode()
        with _writing, contextlib.suppress(OSError):  # the job outlives whoever reads that
            self._stream.write(b"".join(head + line for line in lines))
            self._stream.flush()


def stamp(tag: str, time_too: bool) -> str:
    """The prefix of a line of output."""
    now = time.strftime("%a %b %d %H:%M:%S %Y") if time_too else ""
    return f"[{tag}]<{now}>: " if now else f"[{tag}]: " if tag else ""
