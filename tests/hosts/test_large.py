# SPDX-License-Identifier: Apache-2.0
"""A tensor of more than 2 GiB between two hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.hosts import simulated_hosts, why_not
from harness.mpirun import MpiJob

VARIABLE = "FARANDOLE_TEST_LARGE"
BYTES = 2_200_000_003

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "not skipped"),
    pytest.mark.skipif(
        os.environ.get(VARIABLE) != "1",
        reason=f"needs {VARIABLE}=1 and 6 GB of memory; its arithmetic has a C++ test",
    ),
]

PROGRAM = """
import sys
import numpy as np
import farandole as fd
fd.init()
rank, n = fd.rank(), int(sys.argv[1])
step = 251 * 400_000
pattern = np.resize(np.arange(251, dtype=np.uint8), step)
x = np.empty(n, np.uint8)
for start in range(0, n, step):
    x[start : start + step] = pattern[: n - start] * (rank + 1)
fd.allreduce_(x, op=fd.Sum)
for start in range(0, n, step):
    part = x[start : start + step]
    assert (part == 3 * pattern[: part.size]).all(), start
fd.shutdown()
print("done", rank)
"""


def test_more_than_2_gib(tmp_path: Path) -> None:
    program = tmp_path / "large.py"
    program.write_text(PROGRAM)
    with simulated_hosts(tmp_path, [1, 1]) as hosts:
        argv = [sys.executable, str(program), str(BYTES)]
        with MpiJob(argv, 2, hosts.environment(), hosts.mpi_args()) as job:
            assert job.finish(300).check().out.count("done") == 2
