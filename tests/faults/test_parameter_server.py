# SPDX-License-Identifier: Apache-2.0
"""ParameterServers whose ranks die, hang, leave or idle: a typed error on all others that names the
rank (no MPI)."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]

HEAD = """
import os, signal, sys, threading
import numpy as np
import farandole as fd
from farandole.extras.parameter_server import shard

fd.init()
rank, size = fd.rank(), fd.size()
victim = {victim}
killer = (victim + 1) % size
pids = fd.allgather_object(os.getpid())

def kill():
    os.kill(pids[victim], signal.SIGKILL)

def await_leavers(server):
    with server._shard.changed:
        server._shard.changed.wait_for(lambda: server.clocks.count(float("inf")) == 2)

def told(call):
    try:
        call()
    except (fd.FarandoleError, MemoryError) as error:
        print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}.", flush=True)
"""

# What all others do when the victim dies.
DOINGS = {
    "waits for its clock": """
    with fd.ParameterServer((50, 4), staleness=0) as server:
        server.push(None, np.full((50, 4), rank + 1.0))
        if rank == victim:
            threading.Event().wait()
        server.clock()
        if rank == killer:
            while server.clocks.count(1.0) < size - 1:
                pass
            kill()
        server.pull()
""",
    "trains": """
    with fd.ParameterServer((5000, 4), staleness=None) as server:
        for step in range(1 << 30):
            server.push([rank, 7, step % 5000], np.full((3, 4), rank + 1.0))
            server.clock()
            server.pull([step % 5000, rank])
            if rank == killer and step == 20:
                kill()
""",
    "has left": """
    with fd.ParameterServer((50, 4), staleness=None) as server:
        server.push(None, np.full((50, 4), rank + 1.0))
        server.clock()
        if rank == victim:
            threading.Event().wait()
        if rank == killer:
            threading.Timer(0, kill).start()
""",
}


def job_of(fork_ranks: Start, does: str, size: int, victim: int = 1, **env: str) -> Any:
    return fork_ranks(f"{HEAD.format(victim=victim)}\ndef work():{does}\ntold(work)\n", size, env)


@pytest.mark.parametrize(
    ("doing", "victim", "size"),
    [
        *((doing, 0, 3) for doing in DOINGS),
        ("waits for its clock", 1, 2),
        ("trains", 2, 3),
    ],
)
def test_a_rank_that_is_killed(fork_ranks: Start, doing: str, victim: int, size: int) -> None:
    job = job_of(fork_ranks, DOINGS[doing], size, victim)
    results = job.finish()
    for rank, result in enumerate(results):
        assert result.returncode == (-signal.SIGKILL if rank == victim else 0), job.output()
        if rank != victim:
            died = rf"^rank {rank}: PeerError: .*rank {victim} \(pid \d+ on \S+\) died"
            assert re.search(died, result.out, re.M), job.output()


# Without `with`: rank 1's rows are gone, so the others can't go on.
PULLS = """
    server = fd.ParameterServer((size,), staleness=0)
    if rank == 1:
        while sum(server.clocks) < size - 1:
            pass
        {end}
    else:
        server.clock()
        server.pull([0])
        server.pull()
"""
# An error of its server's thread reaches the worker, and all others by a message.
NO_MEMORY = """
    def scarce(*_, **__):
        raise MemoryError("no memory for a push")
    if rank == 1:
        shard.ShardServer._body = scarce
    with fd.ParameterServer((size,), staleness=0) as server:
        if rank == 0:
            server.push([1], [1.0])
        while True:
            server.clock()
            server.pull([2])
told_ = told
told = lambda call: (told_(call), fd.barrier())  # who left earlier would be another reason
"""


@pytest.mark.parametrize(
    ("does", "says", "well"),
    [
        (PULLS.format(end="fd.shutdown()"), "Error: .*rank 1 ", True),
        (PULLS.format(end="sys.exit(3)"), "Error: .*rank 1 ", False),
        (PULLS.format(end="raise KeyError('mine')"), "Error: .*rank 1 ", False),
        (NO_MEMORY, "PeerError: rank 1 no longer serves its part of a ParameterServer", True),
    ],
    ids=["shutdown", "exit", "exception", "no memory"],
)
def test_a_rank_whose_server_ends(fork_ranks: Start, does: str, says: str, well: bool) -> None:
    job = job_of(fork_ranks, does, 3)
    results = job.finish()
    assert (results[1].returncode == 0) == well, job.output()
    assert does != NO_MEMORY or "rank 1: MemoryError: no memory for a push" in job.output()
    for rank in (0, 2):
        assert re.search(rf"^rank {rank}: .*{says}", results[rank].out, re.M), job.output()


NEVER_ENDS_ITS_TURN = """
    with fd.ParameterServer((4,), staleness=1) as server:
        if rank == 1:
            threading.Event().wait()
        server.clock()
        server.clock()
        server.pull([rank])
"""
NEVER_LEAVES = """
    server = fd.ParameterServer((4,), staleness=1)
    server.close() if rank != 1 else threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (
            NEVER_ENDS_ITS_TURN,
            r"pull\(\) at clock 2 has waited {} s for rank 1, whose clock is 0: each rank must",
        ),
        (NEVER_LEAVES, "leaving a ParameterServer has waited {} s for rank 1"),
    ],
    ids=["its turn", "leaving"],
)
def test_a_worker_that_never_ends(fork_ranks: Start, does: str, what: str) -> None:
    """Its server lives, so that no message is late: the wait itself warns, and then raises. The
    first rank that raises serves no more, so another one may hear of that before its own limit."""
    limits = {"FARANDOLE_STALL_WARN": "0.5", "FARANDOLE_STALL_ABORT": "3"}
    job = job_of(fork_ranks, does, 3, **limits)
    for rank in (0, 2):
        job.ranks[rank].wait_for_output("Error: ")
    job.kill(1)
    job.finish()
    outputs = [job.ranks[rank].output for rank in (0, 2)]
    assert all(re.search(f"RuntimeWarning: {what.format('0.5')}", text) for text in outputs)
    stalled = [bool(re.search(f"StallError: {what.format('3')}", text)) for text in outputs]
    assert any(stalled), job.output()
    for stall, text in zip(stalled, outputs, strict=True):
        assert stall or "PeerError: rank " in text, job.output()


AGAIN = """
    server = fd.ParameterServer((4,))
    fd.shutdown()
    told(server.pull)
    told(server.clock)
    fd.init()
    with fd.ParameterServer((4,), "int64") as server:
        server.push(None, np.full(4, rank + 1))
        server.clock()
        print("table", server.pull().tolist(), flush=True)
"""
NEVER_CLOSES = """
    server = fd.ParameterServer((4,), "int64", staleness=0)
    server.push(None, np.full(4, rank + 1))
    server.clock()
    server.pull()
    fd.barrier()
    print("table", server.pull().tolist(), flush=True)
    fd.barrier()  # with their ranks rows go, too
"""


@pytest.mark.parametrize("does", [AGAIN, NEVER_CLOSES], ids=["shutdown", "end"])
def test_a_program_that_never_closes_it(fork_ranks: Start, does: str) -> None:
    job = job_of(fork_ranks, does, 2)
    for result in job.finish():
        assert "table [3, 3, 3, 3]" in result.check().out
        errors = re.findall("(ShutdownError|PeerError): ", result.out)  # who is second reads this
        assert len(errors) == 2 * (does == AGAIN), job.output()
        assert "Traceback" not in result.out


GOES_ON = """
    says = shard.ShardServer._send_heartbeats
    told = threading.Semaphore(0)
    shard.ShardServer._send_heartbeats = lambda self: (says(self), told.release())
    server = fd.ParameterServer((size,), "int64", staleness=None)
    if rank < 2:
        server.close(wait=False)
        threading.Event().wait()
    await_leavers(server)
    before = fd.metrics()["tensors_submitted"]
    for _ in range(5):  # each after a third of FARANDOLE_STALL_WARN
        told.acquire()
    sent = fd.metrics()["tensors_submitted"] - before
    server.push(None, np.ones(size))
    print("table", server.pull().tolist(), sent <= 3 * 5, flush=True)
    server.close()
"""


def test_a_rank_that_goes_on_long_after_the_others_have_left(fork_ranks: Start) -> None:
    """For longer than FARANDOLE_STALL_ABORT: their servers go on, and hear that it is there by a
    few messages."""
    limits = {"FARANDOLE_STALL_WARN": "1", "FARANDOLE_STALL_ABORT": "1.5"}
    job = job_of(fork_ranks, GOES_ON, 3, **limits)
    job.ranks[2].wait_for_output("table [1, 1, 1] True")
    for rank in (0, 1):
        job.kill(rank)
    assert "StallError" not in job.output()
    job.finish()
