# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not come to init(), or do not leave: nobody waits for ever, and they are named."""

import os
import re
import signal

import pytest

from harness.commands import mpi_version

OPEN_MPI = "Open MPI" in mpi_version()
in_session = pytest.mark.skipif(not OPEN_MPI, reason="Hydra's ranks are in sessions of their own")

# Ranks with MPI, but not yet with farandole.
HEAD = """
import os, signal, sys, threading
from mpi4py import MPI
import numpy as np
import farandole as fd
import farandole.runtime

WORLD = MPI.COMM_WORLD
rank = WORLD.Get_rank()
WORLD.Barrier()  # all have imported what they need: from here on none is late by itself

def tell_process_in(function):
    def entered(frame, event, _):
        if event == "call" and frame.f_code.co_name == function:
            sys.setprofile(None)
            print(f"rank {rank} is process {os.getpid()}.", flush=True)
    sys.setprofile(entered)

def wait_for_ever():
    threading.Event().wait()

def fails(error):
    raise error

def refused(comm):
    try:
        fd.init(comm=comm)
    except (TypeError, ValueError) as error:
        assert "init(comm=" in str(error), error
        wait_for_ever()

def expect(kind, comm=None):
    try:
        fd.init(comm=comm)
    except kind as error:
        print(f"rank {rank} got {type(error).__name__}: {error}", flush=True)
        assert not fd.is_initialized()
        raise

def check():
    assert fd.allreduce(np.ones(1), op=fd.Sum)[0] == fd.size()
    print(f"rank {rank} is fine", flush=True)
"""

LIMIT = {"FARANDOLE_INIT_TIMEOUT": "2"}
NAMED = "did not come to the rendezvous of all ranks within 2 s.*FARANDOLE_INIT_TIMEOUT"


def check_named(out, who, missing):
    for rank in who:
        found = re.search(rf"rank {rank} got StallError: init\(\): (.*)", out)
        assert found, out
        assert re.match(f"{missing} (did not come|came)", found[1]), out
    assert re.search(NAMED, out), out


WAITS, STOPS = "wait_for_ever()", "os.kill(os.getpid(), signal.SIGSTOP)"
BETWEEN = "farandole.runtime._with_world = lambda *_: {ends}\n    expect({kind})"
STOPS_BETWEEN = BETWEEN.format(ends=STOPS, kind="fd.StallError")
# The number of ranks, the absent ones, what they do, and the comm of the others' init().
ABSENCES = {
    "waits": (3, [1], WAITS, ""),
    "is stopped between two steps": (2, [1], STOPS_BETWEEN, ""),
    "rank 0 is absent too": (4, [0, 1], WAITS, ""),
    "of some ranks": (4, [1], WAITS, "[0, 1, 2]"),
    "of a communicator": (4, [1], WAITS, "half"),
    "gives a text": (3, [1], "refused('text')", ""),
}


@pytest.mark.parametrize("how", ABSENCES)
def test_a_rank_that_never_comes(mpi_ranks, how):
    ranks, absent, does, comm = ABSENCES[how]
    outside = "wait_for_ever()" if comm else "expect(fd.StallError)"
    source = f"""{HEAD}
half = WORLD.Split(int(rank < 3), rank)
if rank in {absent}:
    {does}
elif rank == 3:
    {outside}
else:
    expect(fd.StallError, {comm or None})
"""
    result = mpi_ranks(source, ranks, LIMIT).finish(60)
    others = [rank for rank in range(3 if comm else ranks) if rank not in absent]
    check_named(result.out, others, "ranks 0, 1" if len(absent) > 1 else "rank 1")
    assert result.returncode != 0


def test_a_rank_that_does_not_even_start_mpi(mpi_ranks):
    source = """
import os, threading
import farandole as fd
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    threading.Event().wait()
fd.init()
"""
    result = mpi_ranks(source, 2, LIMIT).finish(60)
    assert "has waited 2 s in MPI_Init for the 2 ranks of this job" in result.out, result.out
    assert result.returncode != 0


def test_trying_again_with_a_rank_that_comes_late(mpi_ranks):
    source = (
        HEAD
        + """
if rank == 0:
    try:
        fd.init()
    except fd.StallError as error:
        assert "rank 1 did not come" in str(error), error
    WORLD.send("gave up", 1)
else:
    WORLD.recv(source=0)
for _ in range(3):
    fd.init()
    check()
    fd.shutdown()
"""
    )
    result = mpi_ranks(source, 2, LIMIT).finish(60).check()
    assert result.out.count("is fine") == 6, result.out


@in_session
def test_a_rank_that_is_interrupted_in_init(mpi_ranks):
    source = (
        HEAD
        + """
signal.signal(signal.SIGINT, signal.default_int_handler)
if rank == 2:
    wait_for_ever()
tell_process_in("until")
if rank == 0:
    expect(fd.PeerError)
fd.init()
"""
    )
    job = mpi_ranks(source, 3, {"FARANDOLE_INIT_TIMEOUT": "100"})
    job.process.wait_for_output("rank 0 is")
    job.process.wait_for_output("rank 1 is")
    pid = int(re.search(r"rank 1 is process (\d+)", job.process.output)[1])
    job.kill_rank(pid, signal.SIGINT)
    result = job.finish(60)
    assert "rank 0 got PeerError: init(): rank 1 failed there: KeyboardInterrupt" in result.out


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        ("fails(LookupError('of its own'))", "LookupError: 'of its own'|LookupError: of its own"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os._exit(0)", None),
    ],
)
def test_a_rank_that_ends_between_two_steps_of_init(mpi_ranks, ends, text):
    source = f"{HEAD}if rank == 1:\n    {BETWEEN.format(ends=ends, kind='fd.PeerError')}\n"
    result = mpi_ranks(f"{source}expect(fd.PeerError)\n", 2, LIMIT).finish(60)
    if text is not None:  # else MPI's launcher ends the others
        assert re.search(f"rank 0 got PeerError: init.*{text}", result.out), result.out
    assert result.returncode != 0 or (ends == "os._exit(0)" and not OPEN_MPI)


def test_a_rank_that_never_comes_without_mpi(fork_ranks, tmp_path):
    source = """
import os, sys, threading
import farandole as fd
if os.environ["FARANDOLE_RANK"] in "13":
    threading.Event().wait()
# Ranks 0 and 2 come together, however long each has taken to start.
open(sys.argv[0] + ".fifo", "w" if os.environ["FARANDOLE_RANK"] == "0" else "r").close()
try:
    fd.init()
except fd.StallError as error:
    print(f"rank {os.environ['FARANDOLE_RANK']} got StallError: {error}", flush=True)
"""
    os.mkfifo(tmp_path / "program.py.fifo")
    job = fork_ranks(source, 4, LIMIT)
    for rank in (0, 2):
        job.ranks[rank].wait_for_output("got StallError")
        job.kill(rank + 1)
    job.finish(60)
    assert re.search(f"rank 1, rank 3 {NAMED}", job.output()), job.output()


@in_session
def test_shutdown_is_interrupted(mpi_ranks):
    source = (
        HEAD
        + """
signal.signal(signal.SIGINT, signal.default_int_handler)
fd.init()
fd.barrier()
if rank == 0:
    tell_process_in("_leave_core")
    try:
        fd.shutdown()
    except KeyboardInterrupt:
        fd.shutdown()
        print("interrupted", flush=True)
    assert not fd.is_initialized()
    WORLD.send("interrupted", 1)
else:
    WORLD.recv(source=0)
    try:
        fd.allreduce(np.ones(1))
    except fd.FarandoleError as error:
        print(f"rank {rank} got {error}", flush=True)
    fd.shutdown()
fd.init()
check()
"""
    )
    job = mpi_ranks(source, 2)
    job.process.wait_for_output("rank 0 is process")
    pid = int(re.search(r"rank 0 is process (\d+)", job.process.output)[1])
    job.kill_rank(pid, signal.SIGINT)
    result = job.finish(60).check()
    assert "interrupted" in result.out
    assert "rank 1 got" in result.out
    assert result.out.count("is fine") == 2, result.out
