# SPDX-License-Identifier: Apache-2.0
"""FARANDOLE_AUDIT: memory that flips a bit while gradients are reduced, found and named.

Under the fork launcher (no MPI): survivors live on to write.
"""

import re

from farandole.observe import flight
from farandole.tools import cli

# Rank 0 flips one bit of rank 1's input where it lies staged, again and again.
PROGRAM = """
import ctypes, threading
import numpy as np
import farandole as fd

fd.init()
rank = fd.rank()
over = threading.Event()

def staging():
    for line in open("/proc/self/maps"):
        if "farandole-staging" in line:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            return np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))

def grad(rank):
    return np.arange(60_000, dtype=np.float32) + 100_000 * rank

def step():
    y = fd.allreduce(grad(rank), op=fd.Sum, name="grad")
    assert (y == sum(map(grad, range(3)))).all()

def flip():
    memory = staging()
    at = memory.tobytes().find(grad(1)[:16].tobytes())
    assert at >= 0
    while not over.is_set():
        memory[at + 4 * 5 + 2] ^= 16

for _ in range(20):
    step()
if rank == 0 and FLIPS:
    threading.Thread(target=flip).start()
try:
    for _ in range(20_000 if FLIPS else 30):
        step()
    print("all is well", flush=True)
except AssertionError:
    print("a wrong sum", flush=True)
except fd.PeerError as error:
    print("PeerError", error, flush=True)
over.set()
print("audits", fd.metrics()["audits_done"], "faults", fd.metrics()["faults_found"], flush=True)
"""


def test_memory_that_flips_a_bit_ends_the_job_on_all_ranks(fork_ranks, tmp_path, capsys):
    env = {"FARANDOLE_AUDIT": "1", "FARANDOLE_FLIGHT_DIR": str(tmp_path)}
    results = fork_ranks(PROGRAM.replace("FLIPS", "True"), 3, env).finish()
    for result in results:
        assert re.search(
            r"PeerError .*allreduce 'grad': element 5 is \S+ \(0x\w+\) in the result on rank \d on "
            r"\S+, but \S+ \(0x\w+\) if it is made again; rank 0 on \S+ had made it",
            result.out,
        ), result.out
    assert any("faults 1" in result.out for result in results)
    events = [event for page in flight.read_dumps(tmp_path) for event in page["events"]]
    assert any(event["kind"] == "audit fault" and event["seq"] == 5 for event in events)
    assert cli.main(["explain", str(tmp_path)]) == 0
    assert "found element 5 of allreduce grad, which rank 0 had reduced" in capsys.readouterr().out


def test_every_nth_bucket_is_audited_and_nobody_accused(fork_ranks):
    results = fork_ranks(PROGRAM.replace("FLIPS", "False"), 3, {"FARANDOLE_AUDIT": "10"}).finish()
    for result in results:
        assert "all is well" in result.out
        assert "audits 5 faults 0" in result.out
