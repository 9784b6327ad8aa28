# SPDX-License-Identifier: Apache-2.0
"""One rank ends, in every way a process can: the others hear why at once, and the job ends.

Each way runs under plain mpirun and under the fork launcher (no MPI); a test's name or its fixture
says which.
"""

import re
import signal
import textwrap
import time

import pytest

SOON = 20.0  # seconds until a peer hears of it on a busy machine; else 2: runtime_death_test

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import farandole as fd

fd.init()
fd.barrier()

def wait_for_peer():
    start = time.monotonic()
    try:
        fd.allreduce(np.ones(1000), name="of the others")
    except fd.PeerError as error:
        print(f"rank {fd.rank()} after {time.monotonic() - start:.3f} s: {error}.", flush=True)
        raise

def leave():
"""

TAIL = """
if fd.rank() == 1:
    leave()
else:
    wait_for_peer()
"""

WAYS = {
    "exception": ("raise ValueError('boom')", "ValueError: boom", 1),
    "exit code": ("sys.exit(1)", r"sys.exit\(1\)", 1),
    "exit text": ("sys.exit('no data')", "no data", 1),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", -signal.SIGINT),
    # Nothing in Python sees this one coming.
    "raised exit": ("raise SystemExit(4)", "finished normally", 4),
    "normal end": ("pass", "finished normally", 0),
}


def program(leave, tail=TAIL):
    return HEAD + textwrap.indent(leave, "    ") + "\n" + tail


def check_peers(out, ranks, text):
    for rank in set(range(ranks)) - {1}:
        found = re.search(rf"^rank {rank} after ([\d.]+) s: (.*)$", out, re.MULTILINE)
        assert found, out
        assert float(found[1]) < SOON
        assert "rank 1 " in found[2]
        assert re.search(text, found[2]), found[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_without_mpi(fork_ranks, way, ranks):
    leave, text, code = WAYS[way]
    job = fork_ranks(program(leave), ranks)
    results = job.finish()
    check_peers(job.output(), ranks, text)
    assert [r.returncode for r in results] == [code if rank == 1 else 1 for rank in range(ranks)]


@pytest.mark.parametrize("way", WAYS)
def test_under_mpirun(mpi_ranks, way):
    leave, text, _ = WAYS[way]
    result = mpi_ranks(program(leave), 3).finish()
    check_peers(result.out, 3, text)
    assert result.returncode != 0


@pytest.mark.parametrize("leave", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_sudden_death_under_mpirun(mpi_ranks, leave):
    # MPI itself ends the survivors here: no hang, no residue, and a line that names the dead rank,
    # unless the launcher (MPICH's) is so fast that only its own is seen.
    result = mpi_ranks(program(leave), 3).finish()
    assert result.returncode != 0
    told = r"rank 1 \(pid \d+ on \S+\) died|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
    assert re.search(told, result.out), result.out


def test_mpirun_ends_though_a_peer_handles_the_error(mpi_ranks):
    tail = """
if fd.rank() == 1:
    leave()
try:
    wait_for_peer()
except fd.PeerError:
    print("living on", flush=True)
    threading.Event().wait()
"""
    job = mpi_ranks(program("raise ValueError('boom')", tail), 2)
    job.process.wait_for_output("living on")
    result = job.finish(timeout=6)
    assert result.returncode != 0
    assert "farandole: rank 1 has failed" in result.out


def test_a_peer_may_handle_the_error_and_end(mpi_ranks):
    tail = TAIL.replace(
        "    wait_for_peer()\n",
        "    try:\n        wait_for_peer()\n    except fd.PeerError:\n        print('handled')\n",
    )
    result = mpi_ranks(program("raise ValueError('boom')", tail), 2).finish()
    assert "handled" in result.out
    assert result.returncode != 0


def test_failing_while_a_thread_waits(fork_ranks):
    leave = """
thread = threading.Thread(target=lambda: fd.allreduce(np.ones(2), name="of rank 1 only"))
thread.start()
raise ValueError("boom")
"""
    job = fork_ranks(program(leave), 2)
    results = job.finish()
    check_peers(job.output(), 2, "ValueError: boom")
    assert results[1].returncode == 1


def test_exception_in_a_thread(fork_ranks):
    # The thread's end alone ends nothing; what the process does next counts.
    leave = """
thread = threading.Thread(target=lambda: 1 / 0, name="reader")
thread.start()
thread.join()
sys.exit(5)
"""
    job = fork_ranks(program(leave), 2)
    results = job.finish()
    check_peers(job.output(), 2, "sys.exit.5.; in reader ZeroDivisionError")
    assert results[1].returncode == 5


def test_a_caught_exit_is_none(fork_ranks):
    source = program(
        """
try:
    sys.exit(3)
except SystemExit:
    pass
""",
        "if fd.rank() == 1:\n    leave()\nfd.barrier()\nprint('fine')\n",
    )
    job = fork_ranks(source, 2)
    assert [r.returncode for r in job.finish()] == [0, 0]
    assert job.output().count("fine") == 2


def test_the_user_finalises_mpi(mpi_ranks):
    source = program("pass", "from mpi4py import MPI\nMPI.Finalize()\nprint(fd.is_initialized())\n")
    result = mpi_ranks(source, 3).finish().check()
    assert result.out.count("False") == 3


def test_one_user_finalises_mpi(mpi_ranks):
    leave = "from mpi4py import MPI\nMPI.Finalize()"
    result = mpi_ranks(program(leave), 2).finish()
    check_peers(result.out, 2, "finished normally")
    assert result.returncode != 0


def test_hooks_of_others_are_called_too(fork_ranks):
    source = (
        "import sys\nbefore = sys.excepthook\n"
        "def hook(*args):\n    print('own hook')\n    before(*args)\n"
        "sys.excepthook = hook\n" + program("raise ValueError('boom')")
    )
    job = fork_ranks(source, 2)
    job.finish()
    assert job.output().count("own hook") == 2
    assert "ValueError: boom" in job.ranks[1].output


def test_ctrl_c_ends_a_wait(fork_ranks):
    # A job that a shell started in the background inherits SIGINT as ignored.
    tail = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
if fd.rank() == 0:
    try:
        print("waiting", flush=True)
        fd.allreduce(np.ones(2), name="of rank 0 only")
    except KeyboardInterrupt:
        print(f"interrupted at {time.time()}", flush=True)
        raise
print("idle", flush=True)
wait_for_peer()
"""
    job = fork_ranks(program("pass", tail), 2)
    job.ranks[0].wait_for_output("waiting")
    job.ranks[1].wait_for_output("idle")
    sent = time.time()
    job.kill(0, signal.SIGINT)
    results = job.finish()
    stopped = re.search(r"interrupted at ([\d.]+)", job.ranks[0].output)
    assert float(stopped[1]) - sent < 0.2 + 0.3  # the second term is the machine's noise
    assert "rank 0" in job.ranks[1].output
    assert "KeyboardInterrupt" in job.ranks[1].output
    assert results[0].returncode == -signal.SIGINT


FORKS = program(
    """
global work
import multiprocessing
def work(i):
    texts = []
    for call in (lambda: fd.allreduce(np.ones(2)), fd.init):
        try:
            call()
        except fd.ShutdownError as error:
            texts.append(str(error))
    return len(texts)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(work, range(8)) == [2] * 8
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "leave()\nassert fd.allreduce(np.ones(2), op=fd.Sum)[0] == fd.size()\nprint('fine')\n",
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forked_child_is_refused_and_harmless(fork_ranks, ranks):
    job = fork_ranks(FORKS, ranks)
    assert [r.returncode for r in job.finish()] == [0] * ranks, job.output()
    assert job.output().count("fine") == ranks


def test_a_forked_child_ends_under_mpirun(mpi_ranks):
    result = mpi_ranks(FORKS, 2).finish()
    assert result.returncode == 0, result.out
    assert result.out.count("fine") == 2


GROUPS = """
import sys, tempfile, time
import torch, torch.distributed as dist
import farandole.torch as fd
fd.init()
rank = fd.rank()
folder = sys.argv[0] + ".d"
dist.init_process_group("farandole", f"file://{folder}", rank=rank, world_size=fd.size())
if rank % 2 == 0:
    left = ""
    while "ranks 1, 3 finished normally" not in left:
        try:
            fd.allreduce(torch.ones(2), name="of all")
        except fd.PeerError as error:
            left = str(error)
    for again in range(2):
        group = dist.new_group([0, 2], use_local_synchronization=True)
        x = torch.full([3000], 10.0**rank)
        dist.all_reduce(x, group=group)
        assert x.unique().tolist() == [101.0]
        dist.destroy_process_group(group)
    pair = fd.add_process_set([0, 2])
    assert fd.allreduce(torch.tensor([10.0**rank]), op=fd.Sum, process_set=pair)[0] == 101
    assert fd.remove_process_set(pair)
    try:
        fd.add_process_set([0, 1])
    except fd.PeerError as error:
        assert "rank 1 finished normally and left" in str(error), error
    try:
        fd.add_process_set([0, 2] if rank == 0 else "no ranks")
    except (TypeError, ValueError) as error:
        print("refused:", error, flush=True)
    print("fine", flush=True)
"""


def test_those_who_stay_make_groups_without_those_who_left(fork_ranks):
    job = fork_ranks(GROUPS, 4)
    assert [r.returncode for r in job.finish()] == [0] * 4, job.output()
    assert job.output().count("fine") == 2
    assert len(re.findall("^refused: ", job.output(), re.MULTILINE)) == 2
