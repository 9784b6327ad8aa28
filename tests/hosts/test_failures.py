# SPDX-License-Identifier: Apache-2.0
"""Ranks, leaders and links that fail between hosts. Under plain mpirun MPI ends all ranks soon
after a death; under ULFM they live, and each must raise the same error."""

from __future__ import annotations

import re
import signal
import time

import pytest

from harness.hosts_job import HostsJob, Start

ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")

# Works until an error comes, tells it, and finds that later calls fail with the same one.
WORK = """
import numpy as np
import farandole as fd
fd.init()
size, rank = fd.size(), fd.rank()
elements, handles_it = int(sys.argv[1]), sys.argv[2] == "handles"
fd.barrier()
tell("works")
try:
    step = 0
    while True:
        step += 1
        y = fd.allreduce(np.full(elements, rank + step, np.float32), op=fd.Sum, name="grad")
        assert (y == size * step + size * (size - 1) / 2).all()
        tell("step", step)
        time.sleep(0.01)
except fd.PeerError as error:
    tell("PeerError", f"{time.time():.3f}", error)
    try:
        fd.allreduce(np.ones(3))
    except fd.PeerError:
        tell("again")
    if not handles_it:
        raise
fd.shutdown()
tell("end")
"""
SMALL, LARGE = 10, 300_000  # carried by control alone, and by a wire


def told(job: HostsJob, rank: int) -> tuple[float, str]:
    """When a rank raised PeerError, and its text."""
    job.wait_until_said(rank, "PeerError")
    found = re.search(r"^PeerError (\S+) (.*)$", job.said(rank), re.MULTILINE)
    assert found, job.everything()
    return float(found[1]), found[2]


def begin(start: Start, elements: int, handles: bool = True, **options: object) -> HostsJob:
    """Two hosts of two, under way."""
    job = start(WORK, [2, 2], elements, "handles" if handles else "", **options)  # type: ignore[arg-type]
    for rank in range(4):
        job.wait_until_said(rank, "step 3")
    return job


# Members and leaders of both hosts.
@pytest.mark.parametrize(
    ("victim", "elements", "wire"),
    [(rank, SMALL, "auto") for rank in range(4)]
    + [(1, LARGE, "mpi"), (2, LARGE, "mpi")]
    + [(0, LARGE, "tcp"), (3, LARGE, "tcp")],
)
def test_all_survivors_of_a_death_are_told_who_died_where(
    start: Start, victim: int, elements: int, wire: str
) -> None:
    job = begin(start, elements, mpi_args=ULFM, env={"FARANDOLE_WIRE": wire})
    died = job.signal(victim, signal.SIGKILL)
    late = []
    for rank in {0, 1, 2, 3} - {victim}:
        at, text = told(job, rank)
        late.append(at - died)
        assert f"rank {victim} " in text, text
        assert f"on {job.host_of(victim)}" in text, text
        job.wait_until_said(rank, "again")
        job.wait_until_said(rank, "end")
    print(f"all know after {max(late):.3f} s")
    assert max(late) < 2 + 8  # the second term is for a loaded machine
    result = job.job.process.wait(60)
    assert result is not None, f"mpirun hangs\n{job.everything()}"
    job.wait_until_gone()


# In its third step rank argv[3] dies, and leaves a child that lives until the test gives its word.
WITH_CHILD = WORK.replace(
    'tell("step", step)',
    """if step == 3 and rank == int(sys.argv[3]):
            if os.fork() == 0:
                wait_for_word()
                os._exit(0)
            tell("dies", f"{time.time():.3f}")
            os.kill(os.getpid(), 9)""",
)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_leader_whose_child_lives_on_is_noticed(start: Start, victim: int) -> None:
    """The child has none of its links to the other host."""
    env = {"FARANDOLE_WIRE": "tcp"}
    arguments = (LARGE, "handles", victim)
    job = start(WITH_CHILD, [2, 2], *arguments, mpi_args=ULFM, env=env)
    job.wait_until_said(victim, "dies")
    died = float(job.said(victim).split("dies ")[1])
    for rank in {0, 1, 2, 3} - {victim}:
        at, text = told(job, rank)
        assert f"rank {victim} " in text, text
        assert at - died < 2 + 8  # the second term is for a loaded machine
        job.wait_until_said(rank, "end")
    job.give_word(victim)
    assert job.job.process.wait(60) is not None, f"mpirun hangs\n{job.everything()}"
    job.wait_until_gone()


def test_under_plain_mpirun_a_death_ends_the_job_on_all_hosts(start: Start) -> None:
    """A neighbour tells, unless MPI, which ends all processes as soon as it sees the closed
    connection, is faster."""
    job = begin(start, 1000)
    job.signal(3, signal.SIGKILL)
    result = job.job.process.wait(60)
    assert result is not None, f"hangs\n{job.everything()}"
    assert result.returncode != 0
    assert re.search(r"rank 3 \(pid \d+ on \S+\) died|Socket closed|signal 9", result.out), (
        result.out
    )
    job.wait_until_gone()


@pytest.mark.parametrize(
    ("elements", "wire", "mode", "handles"),
    [
        (SMALL, "mpi", (), False),
        (LARGE, "mpi", (), True),
        (LARGE, "mpi", ULFM, False),
        (LARGE, "tcp", (), True),
    ],
    ids=["small", "handled", "ulfm", "tcp"],
)
def test_a_link_that_stays_down(
    start: Start, elements: int, wire: str, mode: tuple[str, ...], handles: bool
) -> None:
    timeout = 6.0
    env = {"FARANDOLE_PEER_TIMEOUT": str(timeout), "FARANDOLE_WIRE": wire}
    job = begin(start, elements, handles, mpi_args=mode, env=env)
    down = time.time()
    job.hosts.set_link(1, up=False)
    for rank in range(4):
        at, text = told(job, rank)
        other = 2 if rank < 2 else 0  # the leader on the far side
        assert f"rank {other} on {job.host_of(other)}" in text, text
        assert "network" in text
        assert at - down < 2.5 * timeout + 5
    job.wait_until_gone()
