# SPDX-License-Identifier: Apache-2.0
"""What /proc and /dev/shm say about the processes of a job, and the Python stacks of its ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PY_SPY_SECONDS = 30


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    state: str  # one letter, as in ps
    parent: int
    session: int
    command: str

    @property
    def is_python(self) -> bool:
        return "python" in Path(self.command.split("\0")[0]).name


def processes_of_sessions(sessions: set[int]) -> list[ProcessInfo]:
    """Living processes (zombies do not count) that belong to one of these sessions."""
    return [process for process in _processes() if process.session in sessions]


def sessions_below(leader: int) -> set[int]:
    """The session of a process that leads one, and those of its living descendants."""
    family, found = {leader}, {leader}
    processes = _processes()
    while children := {p.pid for p in processes if p.parent in family} - family:
        family |= children
        found |= {p.session for p in processes if p.pid in children}
    return found


def _processes() -> list[ProcessInfo]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it may end while we look
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].decode().split()
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            if fields[0] not in "ZX":
                parent, session = int(fields[1]), int(fields[3])
                found.append(ProcessInfo(int(folder.name), fields[0], parent, session, command))
    return found


def python_stacks(processes: list[ProcessInfo]) -> str:
    """The stack of every Python process, native frames included where the system permits it."""
    return "\n".join(_stack(process.pid) for process in processes if process.is_python)


def _stack(pid: int) -> str:
    own = Path(sys.executable).with_name("py-spy")
    py_spy = own if own.exists() else shutil.which("py-spy") or own  # frameworks' environments
    reasons = []
    for options in (["--native"], []):
        command = [str(py_spy), "dump", *options, "--pid", str(pid)]
        try:
            dump = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(str(error))
            continue
        if dump.returncode == 0:
            return dump.stdout
        reasons.append(dump.stderr.strip())
    # Refused: PYTHONFAULTHANDLER=1 makes the process itself print its threads as it ends.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    return f"Process {pid}: py-spy failed ({'; '.join(reasons)}); its own dump is in the output"


def our_shared_memory() -> list[str]:
    """Files of ours in /dev/shm; there must never be one."""
    return sorted(p.name for p in Path("/dev/shm").iterdir() if "farandole" in p.name)
