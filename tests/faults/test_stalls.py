# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not come: who waits, for whom, where that rank is, and why (no MPI)."""

import re
import signal
import textwrap
from pathlib import Path

import pytest

import farandole as fd

QUICK = {"FARANDOLE_STALL_WARN": "0.3", "FARANDOLE_STALL_ABORT": "1.2"}
# Where Python's thread cannot answer, the report of stacks comes later.
NATIVE = QUICK | {"FARANDOLE_STALL_ABORT": "3"}

HEAD = """
import ctypes, os, signal, sys, threading, time
import numpy as np
import farandole as fd

fd.init()
rank, size = fd.rank(), fd.size()
x = np.full(1000, rank + 1.0)
fd.barrier()

def told(call):
    try:
        call()
    except fd.FarandoleError as error:
        print(f"{type(error).__name__}: {error}\\n.", flush=True)
    else:
        print("no error", flush=True)

def stuck_here():
    threading.Event().wait()
"""

# What rank 1 does instead of the call that the others wait in; what they read of it.
CASES = {
    "missing tensor": (
        "told(lambda: fd.allreduce(x, name='other')); stuck_here()",
        r"rank 1 waits in 'other' \(allreduce\).*: make the same calls on all ranks",
    ),
    "unused": (
        "[fd.allreduce(x, name='all') for _ in range(2)]; stuck_here()",
        r"rank 1 has made other calls since.*it does not make this one",
    ),
    "out of data": (
        "stuck_here()",
        r"rank 1 has made no call for .*run out of data \(use join\(\) or drop_last\)",
    ),
    "busy python": (
        "exec('while True: pass')",
        r'rank 1 has made no call.*File "<string>", line 1 in <module>',
    ),
    "native code": (
        "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
        r"rank 1 has made no call.*system call \d+.*Main thread.*program.py",
    ),
}
OTHERS = {
    "unused": "handle = fd.allreduce_async(x, name='wanted')\n"
    "[fd.allreduce(x, name='all') for _ in range(2)]\ntold(handle.wait)\n"
}
WAIT = "told(lambda: fd.allreduce(x, name='wanted'))\n"


def program(one: str, others: str = WAIT) -> str:
    return (
        HEAD
        + "def work():\n"
        + textwrap.indent(f"if rank == 1:\n    {one}\nelse:\n", "    ")
        + textwrap.indent(others + "os._exit(0)\n", "        ")
        + "work()\n"
    )


def others_than(victim: int, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if rank != victim]


@pytest.mark.parametrize("case", CASES)
def test_a_stall_names_tensor_rank_cause_and_line(fork_ranks, case):
    (one, cause), ranks = CASES[case], 3
    limits = NATIVE if case == "native code" else QUICK
    job = fork_ranks(program(one, OTHERS.get(case, WAIT)), ranks, limits)
    for rank in others_than(1, ranks):
        job.ranks[rank].wait_for_output("StallError")
    report = job.ranks[0].output  # its warning, then the error that all others get too
    job.kill(1)
    job.finish()
    assert "'wanted' (allreduce): " in report
    assert re.search(cause, report, re.DOTALL), report
    for rank in others_than(1, ranks):
        out = job.ranks[rank].output
        found = re.search(r"StallError: (.*?)\n\.", out, re.DOTALL)
        assert found, out
        assert "rank 1 missing" in found[1]
        assert re.search(cause, found[1], re.DOTALL), found[1]
    if case in ("unused", "out of data"):
        assert re.search(r"File .*program\.py\", line \d+ in stuck_here", report)


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_stacks_begin_with_the_user_s_line(fork_ranks, level):
    one = "fd.allreduce(x, name='other')"
    job = fork_ranks(program(one), 2, QUICK | {"FARANDOLE_LOG_LEVEL": level})
    job.ranks[0].wait_for_output("StallError")
    job.kill(1)
    job.finish()
    tops = re.findall(r"rank \d waits in [^\n]*\n +File \"(.*)\", line", job.output())
    assert tops, job.output()
    own = Path(fd.__file__).parent
    for top in map(Path, tops):
        assert top.is_relative_to(own) if level == "debug" else top.name == "program.py", top


def test_a_rank_that_blocks_the_signal_shows_its_native_state(fork_ranks):
    one = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals())); "
        "ctypes.PyDLL(None).pause()"
    )
    job = fork_ranks(program(one), 2, NATIVE)
    job.ranks[0].wait_for_output("StallError")
    job.kill(1)
    job.finish()
    assert "Python has not answered: it is exiting, or native code holds its GIL" in job.output()
    assert re.search(r"thread \d+ \(python\d*\) S", job.output()), job.output()


# The core may be about to send it when Python, in its end, takes its handler away.
def test_the_signal_is_harmless_without_its_handler(fork_ranks):
    source = """
import faulthandler, os, signal
import farandole as fd
fd.init()
fd.barrier()
caught = int(next(x for x in open("/proc/self/status") if x.startswith("SigCgt")).split()[1], 16)
number = max(n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if caught >> (n - 1) & 1)
assert faulthandler.unregister(number)
os.kill(os.getpid(), number)
print("alive")
"""
    job = fork_ranks(source, 1)
    assert [r.returncode for r in job.finish()] == [0], job.output()


def test_no_signal_of_the_user_is_taken(fork_ranks):
    source = """
import faulthandler, signal
taken = [n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)][-3:]
for number in taken:
    signal.signal(number, lambda *_: print("mine"))
import farandole as fd
fd.init()
fd.barrier()
assert [callable(signal.getsignal(n)) for n in taken] == [True] * 3
assert not faulthandler.unregister(taken[0])
assert faulthandler.unregister(taken[0] - 1)
"""
    job = fork_ranks(source, 2)
    assert [r.returncode for r in job.finish()] == [0, 0], job.output()


def test_the_last_batch_only_on_some_ranks(fork_ranks):
    ranks = 3
    source = (
        HEAD
        + """
for step in range(3 if rank == 1 else 4):
    told(lambda: fd.allreduce(x, name="grad"))
"""
    )
    job = fork_ranks(source, ranks)
    assert [r.returncode for r in job.finish()] == [0] * ranks
    for rank in others_than(1, ranks):
        assert job.ranks[rank].output.count("no error") == 3
        assert "PeerError" in job.ranks[rank].output
        # One that comes when all others have left reads `ranks 0, 1`.
        gone = r"^PeerError: .*ranks? (0, 1|0-1|[\d, ]*\b1\b.*) finished normally and left"
        assert re.search(gone, job.ranks[rank].output, re.MULTILINE)
        assert "use join() or drop_last" in job.ranks[rank].output


def test_a_timeout_says_who_is_missing(fork_ranks):
    source = (
        HEAD
        + """
if rank == 0:
    told(lambda: fd.allreduce(x, name="late", timeout=0.2))
    told(lambda: fd.barrier(timeout=0.2))
    told(lambda: fd.join(timeout=0.2))
    os._exit(0)
print("idle", flush=True)
threading.Event().wait()
"""
    )
    job = fork_ranks(source, 3)
    job.ranks[0].wait_for_output("not joined yet")
    job.ranks[0].wait(120)
    for rank in (1, 2):
        job.kill(rank)
    job.finish()
    out = job.ranks[0].output
    assert "allreduce 'late': not done within the timeout of 0.2 s" in out
    assert "s; 'late' (allreduce): rank 0 waiting" in out
    assert out.count("ranks 1, 2 missing") == 2
    assert "ranks 1, 2 not joined yet" in out


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 0)])
def test_a_stopped_rank_is_named(fork_ranks, ranks, victim):
    source = (
        HEAD
        + f"""
if rank == {victim}:
    print("here", flush=True)
    threading.Event().wait()
print("here", flush=True)
sys.stdin.read()  # closed: goes on at once
told(lambda: fd.allreduce(x, name="wanted"))
os._exit(0)
"""
    )
    job = fork_ranks(source, ranks, QUICK)
    job.ranks[victim].wait_for_output("here")
    job.kill(victim, signal.SIGSTOP)
    for rank in others_than(victim, ranks):
        job.ranks[rank].wait_for_output("StallError")
        text = job.ranks[rank].output
        assert re.search(rf"rank {victim}\b", text)
        assert "stopped by a signal or a debugger" in text
        assert f"kill -CONT {job.ranks[victim].pid}" in text
    job.kill(victim)
    job.finish()


def test_a_rank_that_goes_on_in_time_is_waited_for(fork_ranks):
    ranks = 3
    source = (
        HEAD
        + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
print(fd.allreduce(x, op=fd.Sum, name="wanted")[0], flush=True)
"""
    )
    env = {"FARANDOLE_STALL_WARN": "0.2", "FARANDOLE_STALL_ABORT": "60"}
    job = fork_ranks(source, ranks, env)
    job.ranks[0].wait_for_output("rank 1 is stopped by a signal or a debugger")
    job.kill(1, signal.SIGCONT)
    assert [r.returncode for r in job.finish()] == [0] * ranks
    assert job.output().count(str(ranks * (ranks + 1) / 2)) == ranks
