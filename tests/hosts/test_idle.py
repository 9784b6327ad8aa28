# SPDX-License-Identifier: Apache-2.0
"""A link that goes down while nobody has anything to say: no call waits for it, only the leaders'
connection knows. It may come back, or not."""

from __future__ import annotations

import re
import time

import pytest

from harness.hosts_job import HostsJob, Start

ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")

# Works, is idle until the test says otherwise, and works again; what farandole logs goes to the
# rank's own file, since nothing else leaves a host that is cut off.
PROGRAM = """
import numpy as np
os.dup2(os.open(_own + ".txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
import farandole as fd
fd.init()
size, rank, elements = fd.size(), fd.rank(), int(sys.argv[1])

def work(first):
    for step in range(first, first + 5):
        y = fd.allreduce(np.full(elements, rank + step, np.float32), op=fd.Sum, name="grad")
        assert (y == size * step + size * (size - 1) / 2).all()

work(0)
tell("idle")
wait_for_word()
start = time.monotonic()
try:
    work(5)
    tell("worked")
except fd.PeerError as error:
    tell("PeerError", f"{time.monotonic() - start:.3f}", error)
fd.shutdown()
tell("end")
"""
SMALL, LARGE = 10, 300_000  # carried by control alone, and by MPI


def begin(start: Start, elements: int, **options: object) -> HostsJob:
    """Two hosts of two, idle, and the link between them is down."""
    job = start(PROGRAM, [2, 2], elements, **options)  # type: ignore[arg-type]
    for rank in range(4):
        job.wait_until_said(rank, "idle")
    job.hosts.set_link(1, up=False)
    return job


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_link_that_comes_back_is_not_missed(start: Start, elements: int) -> None:
    job = begin(start, elements, env={"FARANDOLE_PEER_TIMEOUT": "15"})
    time.sleep(3)  # the event itself
    job.hosts.set_link(1, up=True)
    for rank in range(4):
        job.give_word(rank)
    for rank in range(4):
        job.wait_until_said(rank, "worked", seconds=10)
    job.finish()


@pytest.mark.parametrize(
    ("elements", "mode"), [(SMALL, ()), (LARGE, ()), (LARGE, ULFM)], ids=["small", "mpi", "ulfm"]
)
def test_a_link_that_stays_down_is_noticed_without_a_call(
    start: Start, elements: int, mode: tuple[str, ...]
) -> None:
    timeout = 15.0
    job = begin(start, elements, mpi_args=mode, env={"FARANDOLE_PEER_TIMEOUT": str(timeout)})
    down = time.monotonic()
    for leader in (0, 2):
        job.wait_until_said(leader, "is lost", seconds=2 * timeout)
    assert time.monotonic() - down > timeout / 2  # nor given up too early
    for rank in range(4):
        job.give_word(rank)
        job.wait_until_said(rank, "PeerError")
        found = re.search(r"^PeerError (\S+) (.*)$", job.said(rank), re.MULTILINE)
        assert found, job.everything()
        other = 2 if rank < 2 else 0  # the leader on the far side
        assert f"rank {other} on {job.host_of(other)}" in found[2], found[2]
        assert "network" in found[2], found[2]
        assert float(found[1]) < timeout  # its first call fails: no second wait for what is known
        job.wait_until_said(rank, "end")
