# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at a step of init() that the seed draws: the others get an error that names it.

A step is a call of the C library that init() makes, by Python or by the core, in any thread: about
250 of them, 370 in rank 0. A library that is loaded before libc counts them."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable

import pytest

from harness.fork import ForkJob
from harness.seed import SEED

RANKS, STEPS = 3, 400
CALLS = """
socket bind listen connect accept4 sendmsg recvmsg send recv getsockopt setsockopt mmap munmap
memfd_create ftruncate ftruncate64 fallocate poll epoll_ctl epoll_wait eventfd fcntl fcntl64
pthread_create syscall open open64 openat close read write unlink rename mkdir
"""

# Every call gets seven words, which is the most that any of these takes (syscall).
COUNTER = """
extern void *dlsym(void *, const char *);
extern int raise(int);
static long last, count;
static void step(void) {
  if (last && __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) == last) raise(9);
}
void die_at(long number) { last = number; }
#define CALL(name)                                                                    \\
  long name(long a, long b, long c, long d, long e, long f, long g) {                 \\
    static long (*next)(long, long, long, long, long, long, long);                    \\
    step();                                                                           \\
    if (!next) next = dlsym((void *)-1L, #name);                                      \\
    return next(a, b, c, d, e, f, g);                                                 \\
  }
"""

PROGRAM = """
import ctypes, os, signal
import numpy as np
import farandole as fd
from farandole import numpy as fn

dies = os.environ["FARANDOLE_RANK"] == os.environ["VICTIM"]
if dies:
    ctypes.CDLL(None).die_at(ctypes.c_long(int(os.environ["STEP"])))
try:
    fd.init()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    fn.allreduce(np.ones(3), name="x")
except (fd.PeerError, fd.StallError) as error:
    print(f"got: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("counter")
    source = folder / "counter.c"
    source.write_text(COUNTER + "\n".join(f"CALL({name})" for name in CALLS.split()))
    library = folder / "counter.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.mark.parametrize("draw", range(8 if os.environ.get("CI") else 4))
def test_a_rank_that_is_killed_at_a_step_of_init(
    fork_ranks: Callable[..., ForkJob], counter: str, draw: int
) -> None:
    chosen = random.Random(f"{SEED} {draw}")
    victim, step = chosen.randrange(RANKS), chosen.randrange(1, STEPS)
    print(f"rank {victim} dies at step {step}")
    env = {"LD_PRELOAD": counter, "VICTIM": str(victim), "STEP": str(step)}
    job = fork_ranks(PROGRAM, RANKS, {**env, "FARANDOLE_INIT_TIMEOUT": "5"})
    job.finish()
    errors = [process.output for process in job.ranks]
    named = [set(map(int, re.findall(r"\brank (\d)", error))) for error in errors]
    for rank in {0, 1, 2} - {victim}:
        assert "got: " in errors[rank], job.output()
        # A rank that comes after that finds a rank that has given up, whose error has the cause.
        assert victim in set().union(*(named[other] for other in named[rank]), named[rank])
