# SPDX-License-Identifier: Apache-2.0
"""The job of a schedule: its commands, its processes, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from farandole.start.rendezvous import RendezvousServer
from harness.hosts import SimulatedHosts, simulated_hosts
from harness.mpirun import MPI_ENVIRONMENT, find_mpirun
from harness.proc import our_shared_memory, processes_of_sessions, python_stacks
from harness.process import SLOWNESS, JobError, Process, wait_until_gone
from harness.supervised import farandole_run
from harness.wire import pids_in
from schedules.schedule import Kind, Schedule

__all__ = ["POLL", "Job"]

PROGRAM = Path(__file__).with_name("program.py")
POLL = 0.02  # seconds between looks at processes, whose ends are no events
# A stop that passes is shorter than any of these, whatever else the machine does.
_LIMITS = {
    "FARANDOLE_STALL_WARN": "1",
    "FARANDOLE_STALL_ABORT": "4",
    "FARANDOLE_PEER_TIMEOUT": "5",
    "FARANDOLE_INIT_TIMEOUT": "8",
}
_ENDS = {"FARANDOLE_SHUTDOWN_TIMEOUT": "6"}  # a day, where a supervisor must see to it
# What starts in the middle of a job must come within these.
_ELASTIC = {
    "FARANDOLE_STALL_ABORT": "6",
    "FARANDOLE_PEER_TIMEOUT": "8",
    "FARANDOLE_INIT_TIMEOUT": "10",
}


class Job:
    """The processes of a schedule's job, all dead when the stack is closed."""

    def __init__(self, schedule: Schedule, folder: Path, stack: ExitStack) -> None:
        kind = schedule.kind
        self.kind = kind
        self.hosts: SimulatedHosts | None = None
        if kind.wired:
            made = simulated_hosts(folder, schedule.hosts, schedule.seed)
            self.hosts = stack.enter_context(made)
        self._folder, self._ranks, self._schedule = folder, schedule.ranks, schedule
        plan = {
            "folder": str(folder),
            "elements": schedule.elements,
            "holds": sorted({fault.step for fault in schedule.faults}),
            "elastic": kind.elastic,
            "first": {},
        }
        if self.hosts is not None:
            firsts = accumulate(schedule.hosts, initial=0)
            plan["first"] = dict(zip(self.hosts.names, firsts, strict=False))
        self._argv = [sys.executable, str(PROGRAM), json.dumps(plan)]
        self._server: RendezvousServer | None = None
        if kind is Kind.FORK:
            self._server = RendezvousServer(schedule.ranks)
            stack.callback(self._server.close)
        self._stack = stack
        self.processes: list[Process] = []

    def start(self) -> None:
        """Starts it; or the next supervisor."""
        path = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**MPI_ENVIRONMENT, **_LIMITS, "PYTHONPATH": ":".join(path)}
        # MPI's own memory, which a killed launcher leaves.
        environment |= {"OMPI_MCA_btl_sm_backing_directory": str(self._folder)}
        environment |= _ELASTIC if self.kind.elastic else _ENDS
        environment["FARANDOLE_CHECKPOINT_SECONDS"] = f"{self._schedule.every:g}"
        environment |= self.hosts.environment() if self.hosts else {}
        for command, own in self._commands():
            process = Process(command, {**environment, **own})
            self._stack.callback(process.kill)
            self.processes.append(process)

    def _commands(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Commands, each with variables of its own."""
        places = self.hosts.mpi_args() if self.hosts else []
        np = ["-np", str(self._ranks)]
        if self._server is not None:
            for rank in range(self._ranks):
                yield self._argv, self._server.environment(rank)
        elif self.kind.elastic:
            words = [*np, "--min-np", str(self._schedule.least), "--restarts", "10"]
            words += ["--checkpoint-dir", str(self._folder / "commits")]
            words += ["-H", self.hosts.places()] if self.hosts else []
            words += ["--blacklist-cooldown-range", "0", "0"]
            yield farandole_run(words, self._argv), {}
        else:
            ulfm = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"] if self.hosts else []
            yield [find_mpirun(), *ulfm, *places, *np, *self._argv], {}

    @property
    def sessions(self) -> set[int]:
        """Of all its processes."""
        return {process.pid for process in self.processes}

    def ended(self) -> bool:
        """Whether what was started here has ended, not what that has started."""
        return all(process.returncode is not None for process in self.processes)

    def agent(self) -> int | None:
        """Of the last host; None: it has none now."""
        words = "\0farandole.launch.agent\0"
        found = [x.pid for x in processes_of_sessions(self.sessions) if words in x.command]
        return max(found, default=None)

    def output(self) -> str:
        """Of all processes."""
        return "\n".join(process.output for process in self.processes)

    def stacks(self) -> str:
        """Of all Python processes, wherever they are."""
        sessions = set(self.sessions)
        for name in self.hosts.names if self.hosts else ():
            for pid in pids_in(name):
                with contextlib.suppress(ProcessLookupError):  # it may end while we look
                    sessions.add(os.getsid(pid))
        return python_stacks(processes_of_sessions(sessions))

    def left(self) -> str:
        """What is left when it has ended; waits for what is about to end."""
        try:
            wait_until_gone(self.sessions)
        except JobError as error:
            return str(error)
        remaining = {}
        for name in self.hosts.names if self.hosts else ():
            deadline = time.monotonic() + 30 * SLOWNESS
            while (remaining := {name: pids_in(name)})[name] and time.monotonic() < deadline:
                time.sleep(POLL)  # they are not our children: no event says that they end
            if remaining[name]:
                return f"processes left on {remaining}"
        return f"left in /dev/shm: {files}" if (files := our_shared_memory()) else ""
