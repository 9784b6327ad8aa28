# SPDX-License-Identifier: Apache-2.0
"""Jobs on hosts that are network namespaces: what crosses the links, and links that fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.hosts import SimulatedHosts, simulated_hosts, why_not
from harness.mpirun import MpiJob, mpi_job

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "not skipped")

# Every rank checks every result, rank 0 tells.
STEPS = """
import os, sys, time
import numpy as np
import farandole as fd
fd.init()
size, rank = fd.size(), fd.rank()
steps, elements, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
print(f"rank {rank} on {os.uname().nodename} {fd.local_rank()}/{fd.local_size()} pid {os.getpid()}")
fd.barrier()
for step in range(steps):
    x = np.full(elements, (rank + 1.0) * (step + 1), np.float32)
    y = fd.allreduce(x, op=fd.Sum)
    assert (y == (step + 1) * size * (size + 1) / 2).all(), (step, y)
    if rank == 0:
        print("step", step, flush=True)
    time.sleep(pause)
fd.shutdown()
print("done", rank)
"""

Start = Callable[..., tuple[SimulatedHosts, MpiJob]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(ranks, *arguments, rate=...): STEPS on hosts with that many ranks each."""
    with ExitStack() as stack:

        def run(
            ranks: list[int], *arguments: object, rate: str = "", env: dict[str, str] | None = None
        ) -> tuple[SimulatedHosts, MpiJob]:
            program = tmp_path / "steps.py"
            program.write_text(STEPS)
            hosts = stack.enter_context(simulated_hosts(tmp_path, ranks))
            if rate:
                hosts.shape(rate)
            argv = [sys.executable, str(program), *map(str, arguments)]
            environment = hosts.environment() | (env or {})
            job = mpi_job(argv, sum(ranks), environment, hosts.mpi_args())
            return hosts, stack.enter_context(job)

        yield run


def finish(hosts: SimulatedHosts, job: MpiJob, seconds: float = 60) -> str:
    """The output of a job that ends well and leaves no process on any host."""
    out = job.finish(seconds).check().out
    assert out.count("done") == sum(hosts.ranks)
    assert [hosts.pids(name) for name in hosts.names] == [[] for _ in hosts.names]
    return out


@pytest.mark.parametrize("ranks", [[2, 2], [2, 1, 1]], ids=["2x2", "2-1-1"])
def test_ranks_share_memory_on_their_own_host_only(start: Start, ranks: list[int]) -> None:
    hosts, job = start(ranks, 5, 50_000, 0)
    out = finish(hosts, job)
    places = re.findall(r"rank \d+ on (\S+) (\d)/(\d)", out)
    expected = [
        (name, str(local), str(n))
        for name, n in zip(hosts.names, ranks, strict=True)
        for local in range(n)
    ]
    assert sorted(places) == expected


def test_each_link_carries_each_byte_once(start: Start) -> None:
    """Two hosts: what each must send is as long as the tensor, however many ranks they have."""
    steps, elements = 10, 1 << 20
    hosts, job = start([2, 2], steps, elements, 0)
    finish(hosts, job)
    for host in range(2):
        sent, _ = hosts.traffic(host)
        assert 1 <= sent / (steps * 4 * elements) < 1.05  # headers, acknowledgements, start and end


def test_a_link_that_is_down_for_3_seconds(start: Start) -> None:
    hosts, job = start([2, 2], 60, 100_000, 0.05)
    job.process.wait_for_output("step 5")
    hosts.set_link(1, up=False)
    time.sleep(3)  # the event itself
    hosts.set_link(1, up=True)
    seen = len(re.findall("^step", job.process.output, re.MULTILINE))
    assert seen < 60
    job.process.wait_for_output(f"step {min(seen + 2, 59)}", timeout=10)
    finish(hosts, job)


def test_a_slow_link(start: Start) -> None:
    hosts, job = start([2, 1, 1], 3, 250_000, 0, rate="40mbit")
    finish(hosts, job)


def test_a_killed_rank_ends_the_job_on_all_hosts(start: Start) -> None:
    """Under plain mpirun: no hang and no process left. A neighbour tells, unless MPI, which ends
    all processes as soon as it sees the closed connection, is faster."""
    hosts, job = start([2, 2], 100_000, 1000, 0.01)
    job.process.wait_for_output("step 5")
    victims = [pid for pid in hosts.pids(hosts.names[1]) if is_rank(pid)]
    assert len(victims) == 2
    os.kill(victims[-1], signal.SIGKILL)
    result = job.process.wait(30)
    assert result is not None, f"hangs\n{job.process.output}"
    assert result.returncode != 0
    assert re.search(r"rank [23] \(pid \d+\) died|Socket closed|signal 9", result.out), result.out
    deadline = time.monotonic() + 5
    while any(hosts.pids(name) for name in hosts.names):
        assert time.monotonic() < deadline, "processes are left"


def is_rank(pid: int) -> bool:
    """Whether the process is Python's; daemons and shells are not."""
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return len(command) > 1 and command[1].endswith("steps.py")
