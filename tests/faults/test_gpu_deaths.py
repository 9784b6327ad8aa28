# SPDX-License-Identifier: Apache-2.0
"""A rank dies in each phase of NCCL's life: PeerError on all others.

Over the GPU double; over NCCL's real host code with make test-nccl.
"""

import re
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

START = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(TESTS)!r})
import numpy as np
import farandole as fd
from harness.gpu_double import Gpu, use_double

use_double()
fd.init()
rank, size = fd.rank(), fd.size()
victim = size - 1
gpu = Gpu(rank)
x = gpu.array(np.ones(5000, "f4"))

def die_after(seconds):
    if rank == victim:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

def await_error(call):
    try:
        while True:
            call()
    except fd.PeerError as error:
        print(f"rank {{rank}}: {{error}}.", flush=True)

def warm():
    fd.allreduce_(x)
    gpu.synchronize(x.stream)
    fd.barrier()

def reduce(**more):
    fd.allreduce_(x, **more)
    gpu.synchronize(x.stream)
    fd.barrier()
"""

PHASES = {
    "connect": """
if rank == victim:
    threading.Thread(target=die_after, args=(SECONDS,)).start()
await_error(reduce)
""",
    "connect a set": """
warm()
part = fd.add_process_set(range(size - 2, size))
if rank == victim:
    threading.Thread(target=die_after, args=(SECONDS,)).start()
if rank in part.ranks:
    await_error(lambda: reduce(process_set=part))
else:
    await_error(fd.barrier)
""",
    # The victim's kernel does not begin, so that those of the others wait for it.
    "collective": """
warm()
if rank == victim:
    gpu.gate(x.stream)
    fd.allreduce_(x)
    die_after(SECONDS)
await_error(reduce)
""",
    "finalize": """
warm()
if rank == victim:
    threading.Thread(target=die_after, args=(SECONDS,)).start()
    time.sleep(SECONDS)
fd.shutdown()
print(f"rank {rank}: it has left.", flush=True)
""",
}
# ncclCommAbort never returns.
DEAF = "collective, deaf"
PHASES[DEAF] = PHASES["collective"].replace(
    "await_error",
    "gpu.lib.gpu_double_hold_aborts(True)\ngpu.synchronize = lambda stream: None\nawait_error",
)
ONCE = (DEAF,)
CASES = [(phase, seconds) for phase in PHASES if phase not in ONCE for seconds in (0.0, 0.05)]
CASES += [(phase, 0.05) for phase in ONCE]


@pytest.mark.parametrize(("phase", "seconds"), CASES)
def test_a_death(fork_ranks, tmp_path, phase, seconds):
    ranks = 3
    source = START + PHASES[phase].replace("SECONDS", str(seconds))
    job = fork_ranks(source, ranks, {"FARANDOLE_TEST_FOLDER": str(tmp_path)})
    results = job.finish()
    assert results[-1].returncode == -signal.SIGKILL
    for rank in range(ranks - 1):
        said = "it has left|.*died" if phase == "finalize" else ".*died"
        assert re.search(rf"^rank {rank}: ({said})", results[rank].out, re.MULTILINE), job.output()
