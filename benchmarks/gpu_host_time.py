# SPDX-License-Identifier: Apache-2.0
"""Measures how long the host is busy with a bucket on a GPU, from the call until its launch.

    make programs && mpirun -n 2 python benchmarks/gpu_host_time.py

Uses the mock GPU or, in the environment of make test-nccl, NCCL's real host code. The time covers
the runtime and the thread that calls NCCL, but no work on a GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

import farandole as fd
from harness.gpu_double import Gpu, use_double

TURNS = 300


def main() -> None:
    folder = Path(f"/tmp/farandole-gpu-host-time-{os.getppid()}")
    folder.mkdir(exist_ok=True)
    os.environ["FARANDOLE_TEST_FOLDER"] = str(folder)
    use_double()
    fd.init()
    gpu = Gpu(fd.rank())
    array = gpu.array(np.full(1000, 1.0 + fd.rank(), np.float32))
    took = []
    for turn in range(TURNS + 20):
        fd.barrier()
        begun = time.perf_counter()
        fd.allreduce_(array, op=fd.Max, name="bucket")
        if turn >= 20:
            took.append(1e6 * (time.perf_counter() - begun))
        gpu.synchronize(gpu.stream)
    assert gpu.read(array).tolist() == [float(fd.size())] * 1000
    if fd.rank() == 0:
        ninth = statistics.quantiles(took, n=10)[-1]
        print(f"{fd.size()} ranks: median {statistics.median(took):.0f} us, 90 % {ninth:.0f} us")
    fd.shutdown()


if __name__ == "__main__":
    main()
