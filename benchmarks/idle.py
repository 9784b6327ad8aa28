# SPDX-License-Identifier: Apache-2.0
"""Measures what an idle job costs after init(), and the memory that farandole adds.

    mpirun -np 2 --bind-to none python benchmarks/idle.py [--seconds 10]

Measures CPU time and context switches of each rank's threads while the main thread sleeps: of the
threads that init() has started, and of all others (Python's, MPI's, torch's). Memory is PSS from
smaps_rollup: its growth from just before init(), when MPI, torch and the gradients are loaded,
until after 10 in-place steps of the 161 gradients of ResNet-50, which are 102 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import resnet50
import torch
from mpi4py import MPI
from turns import print_head

import farandole.torch as hvd

STEPS = 10


@dataclass
class Usage:
    """CPU time and context switches of some threads of this process so far."""

    cpu_ns: int = 0
    voluntary: int = 0
    involuntary: int = 0

    @classmethod
    def of(cls, threads: set[str]) -> Usage:
        total = cls()
        for thread in threads:
            folder = Path("/proc/self/task") / thread
            total.cpu_ns += int((folder / "schedstat").read_text().split()[0])
            status = (folder / "status").read_text()
            switches = re.findall(r"ctxt_switches:\s+(\d+)", status)
            total.voluntary += int(switches[0])
            total.involuntary += int(switches[1])
        return total

    def since(self, earlier: Usage) -> Usage:
        return Usage(
            self.cpu_ns - earlier.cpu_ns,
            self.voluntary - earlier.voluntary,
            self.involuntary - earlier.involuntary,
        )


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def pss() -> int:
    """PSS of this process in bytes: shared pages count in parts. Frees unused memory first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = MPI.COMM_WORLD.rank, range(MPI.COMM_WORLD.size)
    data = resnet50.Data(resnet50.shapes(), rank)
    tensors = [x.clone() for x in data.own]
    wrong = data.wrong(tensors, [rank])  # touches all that the check below needs
    names = [f"gradient.{i}" for i in range(len(tensors))]
    data.wrong(tensors, ranks)

    others, before = threads(), pss()
    hvd.init()
    after_init = pss()
    ours = threads() - others
    for _ in range(STEPS):
        data.fill(tensors)
        pairs = zip(tensors, names, strict=True)
        handles = [hvd.allreduce_async_(x, op=hvd.Sum, name=name) for x, name in pairs]
        for handle in handles:
            handle.wait()
    wrong += data.wrong(tensors, ranks)
    after_steps = pss()
    hvd.barrier()

    start_ours, start_others = Usage.of(ours), Usage.of(others)
    time.sleep(options.seconds)
    idle_ours, idle_others = Usage.of(ours).since(start_ours), Usage.of(others).since(start_others)

    line = {
        "rank": rank,
        "threads": len(ours),
        "cpu_us": idle_ours.cpu_ns / 1e3,
        "wakeups/s": idle_ours.voluntary / options.seconds,
        "preempted": idle_ours.involuntary,
        "others_cpu_us": idle_others.cpu_ns / 1e3,
        "others_wakeups/s": idle_others.voluntary / options.seconds,
        "pss_init_MB": (after_init - before) / 1e6,
        f"pss_{STEPS}_steps_MB": (after_steps - before) / 1e6,
        "wrong": wrong,
    }
    lines = hvd.allgather_object(line)
    print_head(f"# idle for {options.seconds:g} s; threads that init() started, then all others")
    if rank == 0:
        print("  ".join(line))
        for row in lines:
            cells = zip(row, row.values(), strict=True)
            print("  ".join(f"{value:{len(name)}.4g}" for name, value in cells))
    hvd.shutdown()
    return int(any(row["wrong"] for row in lines))


if __name__ == "__main__":
    sys.exit(main())
