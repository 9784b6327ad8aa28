# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` on several hosts: ranks and agents die, hosts are lost, cut off, come
and go; training ends with the bits of an undisturbed run. The agents reach the supervisor by TCP,
from other network namespaces."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from schedules.training import undisturbed

from harness.hosts import simulated_hosts
from harness.supervised import SupervisedJob
from harness.wire import Weather

# With any number of ranks it trains the same. At step 5 ranks hold until there is a file `past`.
PROGRAM = """
from pathlib import Path
import numpy as np
import farandole as fd
import farandole.elastic
from schedules.training import BATCH, STEPS, batches, begin, digest, gradient, moved, seen

def waits():
    waits = not Path("past").exists()
    return fd.allreduce(np.array([waits], np.uint8), op=fd.Max, name="waits")[0]

fd.init()
state = farandole.elastic.ObjectState(steps=0, seen=[], weights=begin(5))

@farandole.elastic.run
def train(state):
    while state.steps < STEPS:
        told = state.steps != 5 or fd.rank() > 0
        while state.steps == 5 and waits():
            if not told:
                print(f"{fd.size()} hold in world {state.world}", flush=True)
            told = True
            state.check_host_updates()
        mine = np.array(batches()[state.steps][fd.rank() :: fd.size()], np.int64)
        total = fd.allreduce(gradient(state.weights, mine), op=fd.Sum, name="gradient")
        state.seen = [*state.seen, *sorted(fd.allgather(mine, name="mine").tolist())]
        state.weights = moved(state.weights, total)
        state.steps += 1
        state.commit()

train(state)
assert state.seen == seen(), state.seen
print(f"rank {fd.rank()} of {fd.size()} ends: {digest(state.weights)}", flush=True)
"""
AGENT = "farandole.launch.agent"
SOON = ("--blacklist-cooldown-range", "0", "0")  # a host gets new ranks at once


class Job:
    """Hosts, and a job on them."""

    def __init__(self, folder: Path, stack: ExitStack, ranks: Sequence[int]) -> None:
        self.folder, self._stack = folder, stack
        self.hosts = stack.enter_context(simulated_hosts(folder, ranks, seed=0))
        (folder / "program.py").write_text(PROGRAM)
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        limits = {"FARANDOLE_PEER_TIMEOUT": "6", "FARANDOLE_INIT_TIMEOUT": "20"}
        self.environment = {**self.hosts.environment(), **limits, "PYTHONPATH": path}

    def start(self, *options: str) -> SupervisedJob:
        """Starts it."""
        words = ["--checkpoint-dir", str(self.folder / "commits"), *options]
        argv = [sys.executable, "program.py"]
        self.run = self._stack.enter_context(SupervisedJob(words, argv, self.environment))
        return self.run

    def wait_for_all(self) -> None:
        """Until there are four ranks again; they may come one by one."""
        again = re.compile(r"4 hold in world ([2-9]|\d\d)")
        assert any(map(again.search, self.run.process.lines())), "it has ended"

    def pids(self, host: int, what: str = "program.py") -> list[int]:
        """Processes on a host in whose command this is."""
        found = []
        for pid in self.hosts.pids(self.hosts.names[host]):
            with suppress(OSError):  # it may end while we look
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if what in command and "python" in Path(command[0]).name:
                    found.append(pid)
        return sorted(found)

    def finish(self, ranks: int) -> list[str]:
        """Lets ranks hold no more. The worlds of the job, which has ended as an undisturbed one of
        any size does."""
        (self.folder / "past").touch()
        out = self.run.finish().check().out
        ends = re.findall(r"^rank (\d+) of (\d+) ends: (.*)$", out, re.MULTILINE)
        expected = {(str(rank), str(ranks), undisturbed(5)) for rank in range(ranks)}
        assert set(ends) == expected, out
        assert not any(self.pids(host) for host in range(len(self.hosts.names))), "ranks are left"
        return re.findall(r"^farandole: (world \d+: \d+ ranks?)", out, re.MULTILINE)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        yield lambda *ranks: Job(tmp_path, stack, ranks)


@pytest.mark.parametrize(
    ("what", "number"),
    [("program.py", signal.SIGKILL), (AGENT, signal.SIGKILL), (AGENT, signal.SIGSTOP)],
)
def test_a_rank_or_an_agent_is_killed_or_stopped(
    make: Callable[..., Job], what: str, number: int
) -> None:
    """The others wait for its successor; with -np there is no smaller world."""
    job = make(2, 2)
    run = job.start("-np", "4", "-H", job.hosts.places(), *SOON)
    run.process.wait_for_output("4 hold in world 1")
    os.kill(job.pids(1, what)[0], number)
    run.process.wait_for_output("4 hold in world 2")
    assert job.finish(4) == ["world 1: 4 ranks", "world 2: 4 ranks"]


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1, 1)])
def test_a_host_is_lost(make: Callable[..., Job], ranks: tuple[int, ...]) -> None:
    """The last one: the others go on with what they have, and without a restart."""
    job = make(*ranks)
    left = 4 - ranks[-1]
    run = job.start("-np", "4", "--min-np", "2", "-H", job.hosts.places())
    run.process.wait_for_output("4 hold in world 1")
    before = job.pids(0)
    job.hosts.cut_power(len(ranks) - 1)
    run.process.wait_for_output(f"{left} hold in world")
    assert job.pids(0) == before
    worlds = job.finish(left)  # two, or more where a machine is so busy that one is given up
    assert (worlds[0], worlds[-1][9:]) == ("world 1: 4 ranks", f"{left} ranks")


def test_a_lost_host_comes_back(make: Callable[..., Job]) -> None:
    job = make(2, 2)
    options = ("-np", "4", "--min-np", "2", "-H", job.hosts.places(), *SOON)
    run = job.start(*options)
    run.process.wait_for_output("4 hold in world 1")
    job.hosts.kill(1)
    job.wait_for_all()
    job.finish(4)


def test_a_host_is_taken_away(make: Callable[..., Job]) -> None:
    """Its agent is told so: its ranks leave, and no other one is started there."""
    job = make(2, 2)
    options = ("-np", "4", "--min-np", "2", "-H", job.hosts.places(), *SOON)
    run = job.start(*options)
    run.process.wait_for_output("4 hold in world 1")
    before = job.pids(0)
    os.kill(job.pids(1, AGENT)[0], signal.SIGTERM)
    run.process.wait_for_output("2 hold in world 2")
    assert job.pids(0) == before
    assert job.finish(2) == ["world 1: 4 ranks", "world 2: 2 ranks"]


ELSE = (0, 2)  # ports of the wire: the other host, and the supervisor
CUTS = {
    "both ways": (*((1, x) for x in ELSE), *((x, 1) for x in ELSE)),
    "out": tuple((1, x) for x in ELSE),
    "in": tuple((x, 1) for x in ELSE),
}


@pytest.mark.parametrize("way", CUTS)
def test_a_host_is_cut_off(make: Callable[..., Job], way: str) -> None:
    """Its ranks end, by themselves or with their agent, which the supervisor ends where that is
    quicker; others take their places only then. Then it is back."""
    job = make(2, 2)
    options = ("-np", "4", "--min-np", "2", "-H", job.hosts.places(), *SOON)
    run = job.start(*options)
    run.process.wait_for_output("4 hold in world 1")
    job.hosts.weather(Weather(cut=CUTS[way]))
    run.process.wait_for_output("2 hold in")
    run.process.wait_for_output(f"the agent on {job.hosts.names[1]} has ended with ")
    assert "4 hold in world 2" not in run.process.output
    job.hosts.weather(Weather())
    job.wait_for_all()
    job.finish(4)


def test_the_discovery_script_removes_a_host(make: Callable[..., Job]) -> None:
    """Its ranks leave at a commit, and the others' processes stay."""
    job = make(2, 2)
    a, b = job.hosts.names
    listed = job.folder / "listed"
    listed.write_text(f"{a}:2\n{b}:2\n")
    options = ("--min-np", "2", "--host-discovery-script", f"cat {listed}")
    run = job.start(*options, "--max-np", "4")
    run.process.wait_for_output("4 hold in world 1")
    before = job.pids(0)
    (job.folder / "new").write_text(f"{a}:2\n")
    (job.folder / "new").replace(listed)
    run.process.wait_for_output("world 2: 2 ranks")
    assert job.pids(0) == before
    assert job.finish(2) == ["world 1: 4 ranks", "world 2: 2 ranks"]


def test_the_supervisor_is_killed(make: Callable[..., Job]) -> None:
    """Its agents and ranks end, on all hosts; the same command goes on from the disk."""
    job = make(2, 2)
    options = ("-np", "4", "-H", job.hosts.places())
    old = job.start(*options)
    old.process.wait_for_output("4 hold in world 1")
    os.kill(old.process.pid, signal.SIGKILL)
    old.finish()
    out = "\n".join(old.process.lines())
    assert out.count("errors.LibraryError: the supervisor of this elastic job") == 4, out
    assert not any(job.pids(host, what) for host in (0, 1) for what in ("program.py", AGENT))
    job.start(*options)
    assert job.finish(4) == ["world 2: 4 ranks"]
