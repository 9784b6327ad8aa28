# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` when hosts are lost, cut off, come and come back. The ranks reach the
supervisor by TCP, from other network namespaces."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.hosts import SimulatedHosts, simulated_hosts
from harness.supervised import TRAINING, SupervisedJob, results, supervised_job

# At these sizes and steps the ranks hold until they are lost, or moved.
HOLDS = """
def event(state):
    at = (fd.size(), state.steps)
    if at in HOLDS and fd.rank() == 0:  # whose commit is on the disk
        print(f"holds at {at}", flush=True)
    while at in HOLDS:
        state.check_host_updates()

HOLDS = [(int(x), int(y)) for x, y in (at.split(",") for at in sys.argv[1:])]
main()
"""


class Job:
    """Two hosts of two ranks, and a job on them."""

    def __init__(self, folder: Path, hosts: SimulatedHosts, stack: ExitStack) -> None:
        self.folder, self.hosts, self._stack = folder, hosts, stack
        self.a, self.b = hosts.names

    def start(
        self,
        source: str,
        *options: str,
        holds: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> SupervisedJob:
        path = self.folder / "program.py"
        path.write_text(TRAINING + source)
        agent = " ".join(self.hosts.mpi_args()[:3])
        words = ("--mpi-args", agent, *options)
        environment = {**self.hosts.environment(), **(env or {})}
        argv = [sys.executable, str(path), *holds]
        return self._stack.enter_context(supervised_job(words, argv, environment))

    def places(self) -> str:
        """Both hosts, for -H."""
        return f"{self.a}:2,{self.b}:2"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        yield Job(tmp_path, stack.enter_context(simulated_hosts(tmp_path, [2, 2])), stack)


def starts(out: str, job: Job) -> list[str]:
    found = re.findall(r"start \d+: (\d) ranks: (.*)", out)
    return [f"{n}: {places}".replace(job.a, "a").replace(job.b, "b") for n, places in found]


def test_a_host_that_is_lost(job: Job) -> None:
    """Training goes on on the other one, though mpirun may return 0."""
    run = job.start(HOLDS, "-np", "4", "--min-np", "2", "-H", job.places(), holds=("4,5",))
    run.process.wait_for_output("holds at (4, 5)")
    job.hosts.cut_power(1)
    out = run.finish().check().out
    assert starts(out, job) == ["4: 2 on a, 2 on b", "2: 2 on a"], out
    assert re.search(rf"rank [23] on {job.b} ended without a word after 5 commits", out)
    assert f"{job.b} is left out for 10 s" in out
    assert results(out).keys() == {0, 1}


def test_a_host_that_is_lost_and_back_at_once(job: Job) -> None:
    """With as many ranks as before the training ends with the same bits."""
    undisturbed = results(job.start(HOLDS, "-H", job.places()).finish().check().out)
    options = ("-H", job.places(), "--blacklist-cooldown-range", "0", "0")
    run = job.start(HOLDS, *options, holds=("4,5",))
    run.process.wait_for_output("holds at (4, 5)")
    job.hosts.kill(1)
    out = run.finish().check().out
    assert starts(out, job) == ["4: 2 on a, 2 on b"] * 2, out
    assert results(out) == undisturbed


def test_a_host_that_comes_back_later(job: Job) -> None:
    """The script no longer lists it, and then again."""
    listed = job.folder / "listed"

    def tell(text: str) -> None:
        (job.folder / "new").write_text(text)
        (job.folder / "new").replace(listed)

    tell(f"{job.a}:2\n{job.b}:2\n")
    options = ("--min-np", "2", "--host-discovery-script", f"cat {listed}")
    options += ("--blacklist-cooldown-range", "0", "0")
    run = job.start(HOLDS, *options, holds=("4,5", "2,7"))
    run.process.wait_for_output("holds at (4, 5)")
    tell(f"{job.a}:2\n")
    run.process.wait_for_output("holds at (2, 7)")
    tell(f"{job.a}:2\n{job.b}:2\n")
    out = run.finish().check().out
    assert starts(out, job) == ["4: 2 on a, 2 on b", "2: 2 on a", "4: 2 on a, 2 on b"], out
    assert results(out).keys() == {0, 1, 2, 3}


def test_a_host_that_is_cut_off(job: Job) -> None:
    """Nothing tells that its ranks have gone but silence."""
    env = {"FARANDOLE_PEER_TIMEOUT": "5", "FARANDOLE_INIT_TIMEOUT": "10"}
    options = ("-np", "4", "--min-np", "2", "-H", job.places())
    run = job.start(HOLDS, *options, holds=("4,5",), env=env)
    run.process.wait_for_output("holds at (4, 5)")
    job.hosts.set_link(1, up=False)
    run.process.wait_for_output("start 2: 2 ranks: 2 on")
    job.hosts.kill(1)  # where the job's session is not seen to end
    out = run.finish().check().out
    assert starts(out, job)[1] == "2: 2 on a", out
    assert results(out).keys() == {0, 1}
