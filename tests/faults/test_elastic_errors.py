# SPDX-License-Identifier: Apache-2.0
"""Elastic training that ends on one rank by its own error: all ranks end, and learn why."""

import re

import pytest

HEAD = """
import sys
import numpy as np
import farandole as fd
import farandole.elastic

fd.init()
rank = fd.rank()
state = farandole.elastic.ObjectState(step=0)

@farandole.elastic.run
def train(state):
    while True:
        if state.step == 3 and rank == 1:
            {ends}
        fd.allreduce(np.ones(1), name="step")
        state.step += 1
        state.commit()

def run():
    try:
        train(state)
    except fd.PeerError as error:
        print(f"rank {{rank}} heard: {{error}}", flush=True)
        raise

"""

PLAIN = "run()\n"
FINALLY = "try:\n    run()\nfinally:\n    fd.shutdown()\n"

ENDS = {
    "exception": ("raise ValueError('bad data')", PLAIN, "ValueError: bad data"),
    "exception, then shutdown()": (
        "raise ValueError('bad data')",
        FINALLY,
        "ValueError: bad data",
    ),
    "exit": ("sys.exit(3)", PLAIN, r"sys.exit\(3\)"),
    "interrupt": ("raise KeyboardInterrupt", PLAIN, "KeyboardInterrupt"),
    "return": ("return", PLAIN, "ended normally"),
    "return, then shutdown()": ("return", FINALLY, "ended normally"),
}


def check(out, ranks, text):
    for rank in set(range(ranks)) - {1}:
        found = re.search(rf"rank {rank} heard: (.*)", out)
        assert found, out
        assert "rank 1" in found[1]
        assert re.search(text, found[1]), out
        assert "does not come back" in found[1], out


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ENDS)
def test_under_mpirun(mpi_ranks, how, ranks):
    ends, tail, text = ENDS[how]
    result = mpi_ranks(HEAD.format(ends=ends) + tail, ranks).finish(60)
    check(result.out, ranks, text)
    assert result.returncode != 0


@pytest.mark.parametrize("how", ENDS)
def test_without_mpi(fork_ranks, how):
    ends, tail, text = ENDS[how]
    job = fork_ranks(HEAD.format(ends=ends) + tail, 3)
    job.finish(60)
    check(job.output(), 3, text)


LATE = (
    HEAD.format(ends="raise fd.StallError('made up')")
    + """
def raises():
    raise ValueError("in a callback")

if rank == 1:
    state.register_reset_callbacks([raises])
run()
"""
)


def test_an_error_between_two_attempts(mpi_ranks):
    """The others have started anew already, and wait for the state."""
    result = mpi_ranks(LATE, 2).finish(60)
    assert re.search("rank 0 heard: .*ValueError: in a callback", result.out), result.out
    assert result.returncode != 0


MEMBERS = (
    HEAD.format(ends="raise RuntimeError('unused')")
    .replace(
        "fd.init()",
        "from mpi4py import MPI\nif MPI.COMM_WORLD.Get_rank() < 2:\n    fd.init(comm=[0, 1])",
    )
    .replace("rank = fd.rank()", "rank = MPI.COMM_WORLD.Get_rank()")
    + """
attempts = []

@farandole.elastic.run
def stall_once(state):
    attempts.append(fd.size())
    if len(attempts) == 1:
        fd.allreduce(np.ones(1), name=f"of rank {fd.rank()} alone", timeout=0.05)
    return attempts

if rank < 2:
    assert stall_once(state) == [2, 2]
    print("again with the same two", flush=True)
"""
)


def test_starting_anew_with_the_same_ranks(mpi_ranks):
    """Those that init(comm=...) named, not the whole world."""
    result = mpi_ranks(MEMBERS, 3).finish(60).check()
    assert result.out.count("again with the same two") == 2, result.out
