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
from pathlib import Path

from farandole.start.rendezvous import RendezvousServer
from harness.hosts import SimulatedHosts, simulated_hosts
from harness.mpirun import MPI_ENVIRONMENT, find_mpirun
from harness.proc import our_shared_memory, processes_of_sessions, python_stacks
from harness.process import SLOWNESS, JobError, Process, wait_until_gone
from harness.supervised import farandole_run
from harness.wire import pids_in
from harness.worlds import ULFM
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


class Job:
    """The processes of a schedule's job, all dead when the stack is closed."""

    def __init__(self, schedule: Schedule, folder: Path, stack: ExitStack) -> None:
        kind = schedule.kind
        self.kind = kind
        self.hosts: SimulatedHosts | None = None
        if kind.wired:
            made = simulated_hosts(folder, schedule.hosts, schedule.seed)
            self.hosts = stack.enter_context(made)
        self._folder, self._ranks = folder, schedule.ranks
        plan = {
            "folder": str(folder),
            "elements": schedule.elements,
            "holds": sorted({fault.step for fault in schedule.faults}),
            "elastic": kind.elastic,
        }
        self._argv = [sys.executable, str(PROGRAM), json.dumps(plan)]
        self._server: RendezvousServer | None = None
        if kind is Kind.FORK:
            self._server = RendezvousServer(schedule.ranks)
            stack.callback(self._server.close)
        self._stack = stack
        self.processes: list[Process] = []

    def start(self) -> None:
        """Starts it, or starts it anew."""
        path = [str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**MPI_ENVIRONMENT, **_LIMITS, "PYTHONPATH": ":".join(path)}
        # MPI's own memory, which a killed launcher leaves.
        environment |= {"OMPI_MCA_btl_sm_backing_directory": str(self._folder)}
        environment |= {} if self.kind.supervised else _ENDS
        environment |= self.hosts.environment() if self.hosts else {}
        for number, (command, own) in enumerate(self._commands()):
            process = Process(command, {**environment, **own})
            self._stack.callback(process.kill)
            self.processes[number : number + 1] = [process]

    def _commands(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Commands, each with variables of its own."""
        places = self.hosts.mpi_args() if self.hosts else []
        np = ["-np", str(self._ranks)]
        if self._server is not None:
            for rank in range(self._ranks):
                yield self._argv, self._server.environment(rank)
        elif self.kind.supervised:
            words = [*np, "--checkpoint-dir", str(self._folder), "--restarts", "10"]
            if self.hosts:
                agent = " ".join(places[:3])
                words += ["--mpi-args", agent, "-H", places[-1]]
                words += ["--blacklist-cooldown-range", "0", "0"]
            yield farandole_run(words, self._argv), {}
        else:
            ulfm = list(ULFM) if self.kind is Kind.WORLDS else []
            if self.kind is Kind.HOSTS:
                ulfm = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
            yield [find_mpirun(), *ulfm, *places, *np, *self._argv], {}

    @property
    def sessions(self) -> set[int]:
        """Of all its processes on this host."""
        return {process.pid for process in self.processes}

    def ended(self) -> bool:
        """Whether what was started here has ended, not what that has started."""
        return all(process.returncode is not None for process in self.processes)

    def launcher(self) -> int | None:
        """The process that started the ranks; None: there is none now."""
        own = self.processes[0].pid
        if not self.kind.supervised:
            return own
        for process in processes_of_sessions(self.sessions):
            with contextlib.suppress(OSError):  # it may end while we look
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == own and "mpirun" in process.command:
                    return process.pid
        return None

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
