# SPDX-License-Identifier: Apache-2.0
"""ParameterServers whose ranks die, hang, leave or idle: a typed error on all others that names the
rank, soon (no MPI)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.process import SLOWNESS

SOON = 5.0 * SLOWNESS  # seconds from a death to the errors of all others

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import farandole as fd

fd.init()
rank, size = fd.rank(), fd.size()
pids = fd.allgather_object(os.getpid())

def kill(victim):
    print(f"dies at {time.time()}.", flush=True)
    os.kill(pids[victim], signal.SIGKILL)

def await_leavers(server):
    with server._shard.changed:
        server._shard.changed.wait_for(lambda: server.clocks.count(float("inf")) == 2)

def told(error):
    print(f"rank {rank} at {time.time()}: {type(error).__name__}: {error}.", flush=True)
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
        kill(victim)
    server.pull()
""",
    "trains": """
with fd.ParameterServer((5000, 4), staleness=None) as server:
    for step in range(1 << 30):
        server.push([rank, 7, step % 5000], np.full((3, 4), rank + 1.0))
        server.clock()
        server.pull([step % 5000, rank])
        if rank == killer and step == 20:
            kill(victim)
""",
    "has left": """
with fd.ParameterServer((50, 4), staleness=None) as server:
    server.push(None, np.full((50, 4), rank + 1.0))
    server.clock()
    if rank == victim:
        threading.Event().wait()
    if rank == killer:
        threading.Timer(0, kill, [victim]).start()
""",
}


def ends(doing: str, victim: int, size: int) -> str:
    lines = "".join(f"    {line}\n" for line in DOINGS[doing].splitlines())
    names = f"victim, killer = {victim}, {(victim + 1) % size}\n"
    return f"{HEAD}{names}try:\n{lines}except fd.FarandoleError as error:\n    told(error)\n"


Start = Callable[..., Any]


@pytest.mark.parametrize("doing", DOINGS)
@pytest.mark.parametrize(("victim", "size"), [(0, 2), (1, 2), (0, 3), (2, 3)])
def test_a_rank_that_is_killed(fork_ranks: Start, doing: str, victim: int, size: int) -> None:
    job = fork_ranks(ends(doing, victim, size), size)
    results = job.finish()
    assert results[victim].returncode == -signal.SIGKILL
    found = re.search(r"dies at ([\d.]+)\.", job.output())
    assert found, job.output()
    died = float(found[1])
    for rank in set(range(size)) - {victim}:
        told = re.search(
            rf"^rank {rank} at ([\d.]+): PeerError: .*rank {victim} \(pid \d+ on \S+\) died",
            job.ranks[rank].output,
            re.MULTILINE,
        )
        assert told, job.output()
        assert float(told[1]) - died < SOON
        assert results[rank].returncode == 0, job.output()


def test_a_worker_that_never_ends_its_turn(fork_ranks: Start) -> None:
    """Its server lives, so that no message is late: the pull itself warns, and then raises."""
    program = f"""{HEAD}
try:
    with fd.ParameterServer((4,), staleness=1) as server:
        if rank == 2:
            await_leavers(server)  # both have raised
        else:
            server.clock()
            server.clock()
            server.pull([rank])
except fd.StallError as error:
    told(error)
fd.barrier()  # who left earlier would be another reason
"""
    environment = {"FARANDOLE_STALL_WARN": "0.5", "FARANDOLE_STALL_ABORT": "3"}
    job = fork_ranks(program, 3, environment)
    job.finish()
    text = r"pull\(\) at clock 2 has waited {} s for rank 2, whose clock is 0: each rank calls"
    for rank in (0, 1):
        output = job.ranks[rank].output
        assert re.search("RuntimeWarning: " + text.format("0.5"), output), job.output()
        assert re.search("StallError: " + text.format("3"), output), job.output()


def test_a_rank_that_never_leaves(fork_ranks: Start, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    program = f"""{HEAD}
server = fd.ParameterServer((4,), staleness=1)
try:
    if rank == 0:
        server.close()
    open({str(told)!r}).close()  # returns when rank 0 has opened the other end
except fd.StallError as error:
    told(error)
    open({str(told)!r}, "w").close()
"""
    environment = {"FARANDOLE_STALL_WARN": "1", "FARANDOLE_STALL_ABORT": "3"}
    job = fork_ranks(program, 2, environment)
    job.finish()
    assert "StallError: leaving a ParameterServer has waited 3 s for rank 1" in job.output()


@pytest.mark.parametrize("how", ["fd.shutdown()", "sys.exit(3)", "raise KeyError('mine')"])
def test_a_rank_that_ends_while_others_pull(fork_ranks: Start, how: str) -> None:
    """Without `with`: its rows are gone, so the others can't go on."""
    program = f"""{HEAD}
server = fd.ParameterServer((size,), staleness=0)
if rank == 1:
    while sum(server.clocks) < size - 1:
        pass
    {how}
else:
    server.clock()
    try:
        server.pull([0])
        server.pull()
    except fd.FarandoleError as error:
        told(error)
"""
    job = fork_ranks(program, 3)
    results = job.finish()
    assert (results[1].returncode == 0) == (how == "fd.shutdown()"), job.output()
    for rank in (0, 2):
        assert re.search(rf"^rank {rank} at .*Error: .*rank 1 ", job.ranks[rank].output, re.M), (
            job.output()
        )


def test_shutdown_with_ones_own_server_open(fork_ranks: Start) -> None:
    program = f"""{HEAD}
server = fd.ParameterServer((4,))
fd.shutdown()
for call in (server.pull, server.clock):
    try:
        call()
    except (fd.ShutdownError, fd.PeerError) as error:  # PeerError: the other rank was first
        told(error)
fd.init()
with fd.ParameterServer((4,), "int64") as server:
    server.push(None, np.full(4, rank + 1))
    server.clock()
    print("again", server.pull().tolist(), flush=True)
"""
    job = fork_ranks(program, 2)
    results = job.finish()
    for rank in (0, 1):
        output = job.ranks[rank].output
        assert len(re.findall("(ShutdownError|PeerError): ", output)) == 2, job.output()
        assert "again [3, 3, 3, 3]" in output, job.output()
        assert results[rank].returncode == 0


def test_a_rank_that_goes_on_long_after_the_others_have_left(
    fork_ranks: Start, tmp_path: Path
) -> None:
    """For longer than FARANDOLE_STALL_ABORT: their servers go on, and hear that it is there."""
    over = tmp_path / "over"
    for rank in "01":
        os.mkfifo(f"{over}{rank}")
    program = f"""{HEAD}
server = fd.ParameterServer((size,), "int64", staleness=None)
if rank < 2:
    server.close(wait=False)
    open({str(over)!r} + str(rank)).close()  # returns when the last rank has opened the other end
else:
    await_leavers(server)
    threading.Event().wait(4)  # what is tested
    server.push(None, np.ones(size))
    print("table", server.pull().tolist(), flush=True)
    for other in "01":
        open({str(over)!r} + other, "w").close()
server.close()
"""
    environment = {"FARANDOLE_STALL_WARN": "1", "FARANDOLE_STALL_ABORT": "3"}
    job = fork_ranks(program, 3, environment)
    job.finish()
    assert "table [1, 1, 1]" in job.output(), job.output()


def test_a_server_that_runs_out_of_memory(fork_ranks: Start) -> None:
    """What its thread raises reaches the worker, and all others by a message."""
    program = f"""{HEAD}
from farandole.extras.parameter_server import shard
if rank == 1:
    def scarce(*_, **__):
        raise MemoryError("no memory for a push")
    shard.Server._body = scarce
try:
    with fd.ParameterServer((size,), staleness=0) as server:
        if rank == 0:
            server.push([1], [1.0])
        while True:
            server.clock()
            server.pull([2])
except (fd.FarandoleError, MemoryError) as error:
    told(error)
fd.barrier()  # who left earlier would be another reason
"""
    job = fork_ranks(program, 3)
    job.finish()
    assert re.search("rank 1 at .*MemoryError: no memory for a push", job.output()), job.output()
    for rank in (0, 2):
        pattern = (
            rf"^rank {rank} at .*PeerError: rank 1 no longer serves its part of a ParameterServer"
        )
        assert re.search(pattern, job.ranks[rank].output, re.M), job.output()


def test_a_program_that_never_closes_it(fork_ranks: Start) -> None:
    program = f"""{HEAD}
def train():
    server = fd.ParameterServer((4,), "int64", staleness=0)
    for _ in range(3):
        server.push(None, np.full(4, rank + 1))
        server.clock()
        table = server.pull()
    fd.barrier()
    table = server.pull()
    fd.barrier()  # with their ranks rows go, too
    return table
print("table", train().tolist(), flush=True)
"""
    job = fork_ranks(program, 3)
    for result in job.finish():
        assert result.returncode == 0, job.output()
    assert job.output().count("table [18, 18, 18, 18]") == 3, job.output()
    assert "Traceback" not in job.output()


def test_an_idle_server_sleeps(fork_ranks: Start) -> None:
    """Nothing polls: some messages in three seconds, of which each costs a fraction of a ms."""
    program = f"""{HEAD}
with fd.ParameterServer((1000, 4)) as server:
    server.pull()
    fd.barrier()
    before, begin = time.process_time(), time.monotonic()
    threading.Event().wait(3)  # what is measured
    print(f"used {{(time.process_time() - before) / (time.monotonic() - begin):.5f}}", flush=True)
    fd.barrier()
"""
    job = fork_ranks(program, 2)
    job.finish()
    shares = [float(share) for share in re.findall(r"used ([\d.]+)", job.output())]
    assert len(shares) == 2, job.output()
    assert max(shares) < 0.01, shares
