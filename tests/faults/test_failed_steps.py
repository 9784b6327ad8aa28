# SPDX-License-Identifier: Apache-2.0
"""A step of init() fails. The error leaves nothing behind, and the next init() succeeds."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable

import pytest

from farandole.launch.place import free_port
from harness import failing
from harness.fork import ForkJob
from harness.mpirun import MpiJob
from harness.process import Process, ended

HEAD = f"""{failing.FAILS}
import os, re, sys, threading
import numpy as np
import farandole as fd

def left():
    before = [t for t in threading.enumerate() if t.name == "farandole.stacks"]
    for thread in before[:-1]:  # those of earlier attempts end
        thread.join()
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(re.sub(r"\\d+", "", os.readlink(f"/proc/self/fd/{{number}}")))
        except OSError:
            pass
    return sorted(names), len(os.listdir("/proc/self/task"))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return failing.build(tmp_path_factory.mktemp("failing"))


def test_each_step_of_a_world_of_one(library: str) -> None:
    """The errors live on, as in a notebook, so no descriptor is closed with them."""
    steps = """
errors, step = [], 0
while step == 0 or failed():
    step += 1
    fail(step)
    try:
        fd.init()
    except (fd.LibraryError, OSError) as error:
        errors.append(error)
    if fd.is_initialized():
        fd.shutdown()
fail(0)
assert len(errors) > 10, errors
"""
    plain = "fd.init()\nfd.shutdown()\n"
    end = "fd.init()\nassert fd.allreduce(np.ones(1))[0] == 1\nfd.shutdown()\nprint(left())\n"
    env = {"LD_PRELOAD": library, "FARANDOLE_RENDEZVOUS": "none"}
    found = [ended([sys.executable, "-c", HEAD + x + end], **env) for x in (steps, plain)]
    assert [x.returncode for x in found] == [0, 0], found[0].stderr + found[1].stderr
    assert found[0].stdout == found[1].stdout


AGAIN = """
kept = []
while not fd.is_initialized():
    try:
        fd.init()
    except fd.LibraryError as error:
        kept.append(error)
        print(error, flush=True)
own = os.environ.get("FARANDOLE_RANK") or os.environ["RANK"]
print("sum", fd.allreduce(np.full(1, 1.0 + int(own)), op=fd.Sum)[0], len(kept), flush=True)
"""


@pytest.mark.parametrize("call", ["socketpair", "epoll_create1", "listen", "pthread_create"])
def test_rank_0_opens_the_rendezvous_again(library: str, call: str) -> None:
    """The rank that failed has left nothing at the address where the others look for it."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Process(
                    [sys.executable, "-c", f"{HEAD}\nif {rank} == 0: fail(1, {call!r})\n{AGAIN}"],
                    {**place, "RANK": str(rank), "LD_PRELOAD": library},
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.wait_for_output("sum 3.0 ")
    assert "sum 3.0 1" in ranks[0].output
    assert "sum 3.0 0" in ranks[1].output


def test_mpi_is_finalised_after_a_first_init_that_failed(
    mpi_ranks: Callable[..., MpiJob],
) -> None:
    """Otherwise mpirun ends with an error."""
    source = """
import os
import farandole as fd
from farandole.start.siblings import Siblings

def fail(_):
    Siblings.wait_for_birth = wait
    raise fd.LibraryError("before MPI is loaded")

wait, kept = Siblings.wait_for_birth, []
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    Siblings.wait_for_birth = fail
while not fd.is_initialized():
    try:
        fd.init()
    except fd.LibraryError as error:
        kept.append(error)
fd.barrier()
print("fine", len(kept), flush=True)
"""
    out = mpi_ranks(source, 2).finish().check().out
    assert sorted(re.findall("fine .", out)) == ["fine 0", "fine 1"]


def test_ctrl_c_while_goodbyes_are_exchanged(mpi_ranks: Callable[..., MpiJob]) -> None:
    """MPI writes the goodbye of a rank that leaves later. Nobody else uses that memory by then."""
    source = """
from mpi4py import MPI
import farandole as fd
from farandole import runtime
from farandole.start import bootstrap, mpi_ranks

def interrupt(*_):
    raise KeyboardInterrupt

world = MPI.COMM_WORLD
fd.init()
if world.rank == 0:
    leave = runtime._leave_core
    runtime._leave_core = lambda *_: (setattr(runtime, "_leave_core", leave), interrupt())
    completes, mpi_ranks._completes = mpi_ranks._completes, interrupt
    try:
        fd.shutdown()
    except KeyboardInterrupt as reason:
        pass
    mpi_ranks._completes = completes
    canaries = [bytearray(b"c" * bootstrap.Goodbye.BYTES * 2) for _ in range(1000)]
world.Barrier()
if world.rank == 1:
    try:
        fd.shutdown()
    except fd.PeerError:
        pass
for _ in range(100):
    world.Barrier()  # MPI makes progress
if world.rank == 0:
    assert all(set(canary) == set(b"c") for canary in canaries)
print("fine", flush=True)
"""
    assert mpi_ranks(source, 2).finish().check().out.count("fine") == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_each_step_of_one_of_two_ranks(
    fork_ranks: Callable[..., ForkJob], library: str, victim: int
) -> None:
    """Each rank tries until it is in a world. Both find the same descriptors as before."""
    source = f"""{HEAD}
victim, step, more = os.environ["FARANDOLE_RANK"] == "{victim}", 0, 1.0
fd.init()
fd.shutdown()
before, errors = left(), []
while more:
    step += 1
    if victim:
        fail(step)
    while not fd.is_initialized():
        try:
            fd.init()
        except fd.FarandoleError as error:
            errors.append(error)
    more = fd.allreduce(np.full(1, float(victim and failed() != "")), op=fd.Max)[0]
    fd.shutdown()
fail(0)
assert left() == before, (before, left())
print("fine", len(errors) > 5, flush=True)
"""
    limits = {"LD_PRELOAD": library, "FARANDOLE_INIT_TIMEOUT": "10"}
    for result in fork_ranks(source, 2, limits).finish():
        assert "fine True" in result.check().out
