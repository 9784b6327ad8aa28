# SPDX-License-Identifier: Apache-2.0
"""A process in a session of its own: output read as it comes, killed with its descendants."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.proc import our_shared_memory, processes_of_sessions, python_stacks

PATIENCE = 120.0  # seconds for what takes a moment, on a machine that is very busy
# How often as long everything may take: where a sanitizer watches, and other jobs use the cores.
SLOWNESS = float(os.environ.get("FARANDOLE_TEST_SLOWNESS", "1"))
SLOWNESS *= max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
EXIT_SECONDS = 30.0 * SLOWNESS  # for the last descendants to go once the job is over or was killed


def ended(
    argv: Sequence[str | Path], seconds: float = PATIENCE, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed; `env`: variables beside this process's."""
    limit = seconds * SLOWNESS
    return subprocess.run(
        argv, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=limit
    )


class JobError(AssertionError):
    """A job failed, hung or left something behind; the text holds its output."""


@dataclass(frozen=True)
class JobResult:
    """How a process or job ended; `out` is stdout and stderr in the order they came."""

    returncode: int
    out: str
    seconds: float

    def check(self) -> JobResult:
        """Raise JobError with the output unless the exit code is 0."""
        if self.returncode != 0:
            raise JobError(f"exit code {self.returncode} after {self.seconds:.1f} s\n{self.out}")
        return self


class Process:
    """A child in its own session, so that `kill` reaches every descendant and nobody else.

    As a context manager: it is dead when the block is left, however it is left."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        # An mpirun that is killed leaves its folder, and Open MPI 5.0.11 does not start with the
        # number of a process whose folder is there.
        folder = tempfile.mkdtemp(prefix="job-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        always = {
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "PRTE_MCA_prte_tmpdir_base": folder,
        }
        self._child = subprocess.Popen(
            argv,
            env={**os.environ, **always, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = bytearray()
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Process and session id."""
        return self._child.pid

    @property
    def output(self) -> str:
        """What it has written so far."""
        with self._changed:
            return self._output.decode(errors="replace")

    @property
    def returncode(self) -> int | None:
        """Exit code, minus the signal's number if one ended it, or None while it runs."""
        return self._child.poll()

    def wait_for_output(self, text: str, timeout: float = PATIENCE) -> None:
        """Return once the output contains `text`; JobError if it ends or time is up before."""
        with self._changed:
            wanted = text.encode()
            limit = timeout * SLOWNESS
            self._changed.wait_for(lambda: wanted in self._output or self._ended, limit)
            if wanted not in self._output:
                raise JobError(f"no {text!r} within {timeout} s in the output:\n{self.output}")

    def lines(self) -> Iterator[str]:
        """Each line of the output as it comes, to its end."""
        start = 0
        while (end := self._line_end(start)) >= 0:
            yield self._output[start:end].decode(errors="replace")
            start = end + 1

    def _line_end(self, start: int) -> int:
        """Where the line that begins at `start` ends, once it does; -1: never."""
        with self._changed:
            self._changed.wait_for(lambda: b"\n" in self._output[start:] or self._ended)
            return self._output.find(b"\n", start)

    def wait(self, timeout: float) -> JobResult | None:
        """The result, or None if it still runs after `timeout` seconds."""
        try:
            returncode = self._child.wait(max(timeout, 0))
        except subprocess.TimeoutExpired:
            return None
        seconds = time.monotonic() - self.started
        self._reader.join(1.0)  # a descendant that outlives it may hold the pipe open
        return JobResult(returncode, self.output, seconds)

    def end(self, timeout: float = PATIENCE) -> JobResult:
        """The result; JobError with the output if it still runs after `timeout` seconds."""
        if result := self.wait(timeout * SLOWNESS):
            return result
        raise JobError(f"hung for {timeout} s\n{self.output}")

    def signal(self, number: int) -> None:
        """Send a signal to this one process; none if it has ended."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to every process of the session, until none is left."""
        wait_until_gone({self.pid}, kill=True)
        self._child.wait()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                with self._changed:
                    self._output += part
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Job:
    """A running job; `process`, its launcher, gives its output and waits for parts of it.

    As a context manager: it is dead when the block is left, however it is left."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = Process(command, env)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    def stacks(self) -> str:
        """Stacks of all Python processes of the job."""
        return python_stacks(processes_of_sessions({self.process.pid}))

    def kill_rank(self, pid: int, number: int) -> None:
        """Signal one rank by the process id it has printed; refused for another job's process."""
        if pid not in {p.pid for p in processes_of_sessions({self.process.pid})}:
            raise JobError(f"process {pid} is not of this job:\n{self.process.output}")
        os.kill(pid, number)

    def finish(self, timeout: float = PATIENCE) -> JobResult:
        """Wait for the end; after `timeout` seconds kill all and raise JobError with stacks."""
        result = self.process.wait(timeout * SLOWNESS)
        if result is None:
            stacks = self.stacks()
            self.process.kill()
            raise JobError(f"hung for {timeout} s\n{self.process.output}\n{stacks}")
        check_no_residue({self.process.pid})
        return result


def wait_until_gone(sessions: set[int], *, kill: bool = False) -> None:
    """Return when no process of the sessions lives; JobError naming those left after 30 s."""
    deadline = time.monotonic() + EXIT_SECONDS
    while left := processes_of_sessions(sessions):
        if time.monotonic() > deadline:
            raise JobError(f"processes left behind: {left}")
        for process in left if kill else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)  # descendants are not our children: no event says that they end


def check_no_residue(sessions: set[int]) -> None:
    """Raise JobError if a process of the job, or a file of ours in /dev/shm, outlived the job."""
    wait_until_gone(sessions)
    if files := our_shared_memory():
        raise JobError(f"left in /dev/shm: {files}")
