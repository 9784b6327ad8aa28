# SPDX-License-Identifier: Apache-2.0
"""Shared memory of messages: it doesn't grow with the number of ranks that a rank has sent to."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from harness.fork import ForkJob

# Every rank sends to every other one, twice; then rank 0 tells the memory of its pairs.
EXCHANGE = """
import os
import numpy as np
import farandole as fd

fd.init()
rank, size = fd.rank(), fd.size()

def staging():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.exists(path) and "farandole-staging" in os.readlink(path):
            status = os.stat(path)
            found[status.st_ino] = status.st_blocks * 512
    return found

world = staging()
x, y = np.full(1 << 21, rank + 1.0), np.zeros(1 << 21)
for step in [*range(1, size), *range(1, size)]:
    source = (rank - step) % size
    handle = fd.recv_async(y, source)
    fd.send(x, (rank + step) % size)
    handle.wait()
    assert (y == source + 1).all()
    fd.barrier()
if rank == 0:
    pairs = [bytes for file, bytes in staging().items() if file not in world]
    print(f"pairs: {len(pairs)}, bytes: {sum(pairs)}", flush=True)
fd.barrier()
"""


# A few blocks in flight, and so many that a rank keeps those of its last messages only.
@pytest.mark.parametrize(("slots", "most_mb"), [(4, 5), (64, 50)])
def test_pairs_share_little_memory(
    fork_ranks: Callable[..., ForkJob], slots: int, most_mb: int
) -> None:
    job = fork_ranks(EXCHANGE, 3, {"FARANDOLE_STAGING_SLOTS": str(slots)})
    assert [rank.returncode for rank in job.finish()] == [0] * 3, job.output()
    found = re.search(r"pairs: (\d+), bytes: (\d+)", job.output())
    assert found, job.output()
    assert found[1] == "2"
    assert int(found[2]) < most_mb << 20
