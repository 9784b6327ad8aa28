# SPDX-License-Identifier: Apache-2.0
"""Programs on simulated hosts: which process is which rank, what each says, and that all go."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.hosts import SimulatedHosts, simulated_hosts
from harness.mpirun import MpiJob
from harness.process import PATIENCE, SLOWNESS, Job, JobError

__all__ = ["HostsJob", "Start"]

GONE_SECONDS = 60.0  # for the last processes of a job


@dataclass
class HostsJob:
    """A job under mpirun on simulated hosts."""

    hosts: SimulatedHosts
    job: Job
    folder: Path

    def output(self) -> str:
        """What mpirun showed; a host that is cut off shows nothing there."""
        return self.job.process.output

    def pids(self, host: int) -> dict[int, int]:
        """Processes by rank on a host, as seen from outside."""
        found = {}
        for pid in self.hosts.pids(self.hosts.names[host]):
            with suppress(OSError):  # it may end while we look
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if len(command) < 2 or not command[1].endswith("program.py"):
                    continue
                environment = Path(f"/proc/{pid}/environ").read_text()
                if rank := re.search(r"\0OMPI_COMM_WORLD_RANK=(\d+)\0", environment):
                    found[int(rank[1])] = pid
        return found

    def pid_of(self, rank: int) -> int:
        """Of one rank."""
        return next(
            pids[rank] for host in range(len(self.hosts.names)) if rank in (pids := self.pids(host))
        )

    def signal(self, rank: int, number: int) -> float:
        """Sends a rank a signal; returns when, in seconds since 1970."""
        pid = self.pid_of(rank)
        at = time.time()
        os.kill(pid, number)
        return at

    def host_of(self, rank: int) -> str:
        """The name of the host on which a rank is placed."""
        first = 0
        for name, ranks in zip(self.hosts.names, self.hosts.ranks, strict=True):
            if rank < (first := first + ranks):
                return name
        raise ValueError(f"no rank {rank}")

    def said(self, rank: int) -> str:
        """What a rank has written to its own file."""
        path = self.folder / f"rank-{rank}.txt"
        return path.read_text() if path.exists() else ""

    def wait_until_said(self, rank: int, text: str, seconds: float = PATIENCE) -> None:
        """Returns once that rank has written `text` there."""
        deadline = time.monotonic() + seconds * SLOWNESS
        while text not in self.said(rank):
            if time.monotonic() > deadline:
                stacks = self.job.stacks()
                raise JobError(f"rank {rank} never said {text!r}\n{self.everything()}\n{stacks}")
            time.sleep(0.02)  # files have no event that crosses mount namespaces

    def give_word(self, rank: int) -> None:
        """Lets a rank return from wait_for_word(), now or later; one that is gone is an error."""
        fd = os.open(self.folder / f"rank-{rank}.fifo", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"!")
        os.close(fd)

    def everything(self) -> str:
        """All output."""
        ranks = range(sum(self.hosts.ranks))
        told = [f"--- rank {rank}\n{self.said(rank)}" for rank in ranks]
        return "\n".join([self.output(), *told])

    def finish(self, seconds: float = PATIENCE) -> str:
        """The output of a job that ends well and leaves no process on any host."""
        out = self.job.finish(seconds).check().out
        self.wait_until_gone()
        return out

    def wait_until_gone(self, seconds: float = GONE_SECONDS) -> None:
        """Returns when no rank is left on any host."""
        deadline = time.monotonic() + seconds * SLOWNESS
        while left := [self.pids(host) for host in range(len(self.hosts.names))]:
            if not any(left):
                return
            if time.monotonic() > deadline:
                raise JobError(f"ranks are left: {left}\n{self.everything()}\n{self.job.stacks()}")
            time.sleep(0.05)  # they are not our children: no event says that they end


_HEAD = """
import os, sys, time
_own = os.path.join(os.path.dirname(__file__), f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}")
def tell(*words):
    with open(_own + ".txt", "a") as file:
        print(*words, file=file)
os.mkfifo(_own + ".fifo")
_word = os.open(_own + ".fifo", os.O_RDWR)
def wait_for_word():
    os.read(_word, 1)
"""


class Start:
    """start(source, ranks, *arguments): that program on hosts with that many ranks each.

    It may call tell(...), which writes to the rank's own file, and wait_for_word(), which returns
    once the test calls give_word(rank)."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def hosts(self, ranks: list[int], rate: str = "") -> SimulatedHosts:
        """The hosts alone, for tests that change them first."""
        hosts = self._stack.enter_context(simulated_hosts(self._folder, ranks))
        if rate:
            hosts.shape(rate)
        return hosts

    def __call__(
        self,
        source: str,
        hosts: list[int] | SimulatedHosts,
        *arguments: object,
        rate: str = "",
        env: dict[str, str] | None = None,
        mpi_args: tuple[str, ...] = (),
    ) -> HostsJob:
        program = self._folder / "program.py"
        program.write_text(_HEAD + source)
        if isinstance(hosts, list):
            hosts = self.hosts(hosts, rate)
        argv = [sys.executable, str(program), *map(str, arguments)]
        environment = hosts.environment() | (env or {})
        options = [*mpi_args, *hosts.mpi_args()]
        job = self._stack.enter_context(MpiJob(argv, sum(hosts.ranks), environment, options))
        return HostsJob(hosts, job, self._folder)
