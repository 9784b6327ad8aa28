# SPDX-License-Identifier: Apache-2.0
"""Ranks that end before they have come to init(), or are stopped meanwhile: the others hear of it
long before FARANDOLE_INIT_TIMEOUT where the machine shows it, and else when that has passed."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from harness.commands import mpi_version
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, Process

OPEN_MPI_5 = "Open MPI) 5" in mpi_version()
PATIENT = {"FARANDOLE_INIT_TIMEOUT": "600"}  # longer than a test may take
ENDED = r"PeerError: init\(\): ranks? [\d, ]*1\b[\d, ]* ended before coming to the rendezvous"

TORCHRUN = """
import os, sys
import farandole as fd
if os.environ["RANK"] == "1":
    sys.exit(0)
try:
    fd.init()
except fd.PeerError as error:
    print(f"rank {os.environ['RANK']} got PeerError: {error}", flush=True)
"""


def test_a_rank_of_torchrun_that_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with Process([*command, str(path)], {**MPI_ENVIRONMENT, **PATIENT}) as job:
        out = job.end().out
    for rank in (0, 2):  # the second one may see the end of the first one too
        assert f"rank {rank} got PeerError: " in out, out
    assert re.search(ENDED, out), out


# The end of one rank waits for an event on another: opening a FIFO waits for who opens it too.
FIFO = """
import contextlib, os, signal, sys
import farandole as fd
path = sys.argv[0] + ".fifo"
with contextlib.suppress(FileExistsError):
    os.mkfifo(path)
"""

SEEN = """
from farandole.start import siblings
if os.environ["FARANDOLE_RANK"] == "1":
    open(path).close()
    sys.exit(0)
look = siblings.Siblings.dead
def dead(self):
    found = look(self)
    if 1 in self._seen and os.path.exists(path):
        open(path, "w").close()
        os.unlink(path)
    return found
siblings.Siblings.dead = dead
try:
    fd.init()
except fd.PeerError as error:
    print(f"got PeerError: {error}", flush=True)
"""


def test_a_rank_that_was_there_and_has_ended(fork_ranks) -> None:
    """Who starts ranks one by one may start one late: only one that was there can have ended."""
    job = fork_ranks(FIFO + SEEN, 2, PATIENT)
    job.finish(PATIENCE)
    assert re.search(ENDED, job.output()), job.output()


ULFM = """
rank = os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    open(path).close()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "0":
    open(path, "w").close()
fd.init()
"""


@pytest.mark.skipif(not OPEN_MPI_5, reason="others end the job themselves")
def test_a_rank_that_dies_when_the_others_call_init(mpi_ranks) -> None:
    """Under ULFM MPI lets them live, and wait in MPI_Init, which Python can't interrupt."""
    words = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
    result = mpi_ranks(FIFO + ULFM, 3, PATIENT, mpi_args=words).finish(PATIENCE)
    assert re.search(ENDED, result.out), result.out
    assert "LibraryError" not in result.out, result.out


STOPPED = """
import os, signal, sys, threading
from mpi4py import MPI
import farandole as fd

rank = MPI.COMM_WORLD.Get_rank()
leaves = WHERE == "shutdown"
if leaves:
    fd.init()
    fd.barrier()
if rank == 1:
    print(f"rank 1 is process {os.getpid()}.", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    fd.shutdown() if leaves else fd.init()
    print(f"rank {rank} got nothing", flush=True)
except fd.FarandoleError as error:
    print(f"rank {rank} got {type(error).__name__}: {error}", flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not OPEN_MPI_5, reason="Hydra's ranks are in sessions of their own")
@pytest.mark.parametrize("where", ["init", "shutdown"])
def test_a_rank_that_is_stopped_for_longer_than_the_limit(mpi_ranks, where: str) -> None:
    limit = {f"FARANDOLE_{where.upper()}_TIMEOUT": "2"}
    job = mpi_ranks(f"WHERE = {where!r}" + STOPPED, 2, limit)
    job.process.wait_for_output("rank 0 got StallError")
    pid = int(re.search(r"rank 1 is process (\d+)", job.process.output)[1])
    job.kill_rank(pid, signal.SIGCONT)
    late = "StallError: init.*came after the others had given up" if where == "init" else ""
    job.process.wait_for_output("rank 1 got")
    assert re.search(rf"rank 1 got (nothing|{late or 'PeerError|StallError'})", job.process.output)
