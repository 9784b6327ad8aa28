# SPDX-License-Identifier: Apache-2.0
"""Resident memory of a long job whose arrays have random sizes and lifetimes, against what it uses.

    mpirun -np 2 --bind-to none python benchmarks/resident.py [--seconds 1200]

Each step reduces some arrays of 8 bytes to 4 MB and keeps some results for a while, as the steps of
a training with ragged inputs do. Ten times, rank 0 prints its resident anonymous memory and what
malloc has in use (mallinfo2): a ratio that grows is fragmentation, use that grows is a leak.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from pathlib import Path

import numpy as np

import farandole as fd

LARGEST = 20  # a power of two of float32
KEPT = 200  # results that live on


class Mallinfo2(ctypes.Structure):
    """What glibc says of its heap, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = Mallinfo2


def in_use() -> int:
    """Bytes that malloc has given out."""
    now = _libc.mallinfo2()
    return int(now.uordblks + now.hblkhd)


def resident() -> int:
    """Anonymous bytes of this process that are in memory."""
    text = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", text)[0]) << 10


def step(random: np.random.Generator, kept: list[np.ndarray]) -> None:
    """One step; `random` is alike on all ranks."""
    handles = []
    for _ in range(int(random.integers(1, 12))):
        elements = int(2 ** random.uniform(1, LARGEST))
        handles.append(fd.allreduce_async(np.full(elements, fd.rank() + 1, np.float32), op=fd.Sum))
    for handle in handles:
        result = handle.wait()
        assert result[0] == fd.size() * (fd.size() + 1) / 2
        if random.random() < 0.3:
            if len(kept) < KEPT:
                kept.append(result)
            else:
                kept[int(random.integers(KEPT))] = result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    options = parser.parse_args()
    fd.init()
    random, kept = np.random.default_rng(1), []
    began, steps = time.monotonic(), 0
    for tenth in range(1, 11):
        # Rank 0's clock tells all when to print.
        while fd.broadcast_object(time.monotonic() - began < tenth * options.seconds / 10):
            for _ in range(50):
                step(random, kept)
                steps += 1
        if fd.rank() == 0:
            used, here = in_use(), resident()
            seconds = time.monotonic() - began
            print(
                f"{seconds:6.0f} s {steps:7d} steps: {used / 1e6:6.1f} MB in use, "
                f"{here / 1e6:6.1f} MB resident, {here / used:.2f} times",
                flush=True,
            )
    fd.shutdown()


if __name__ == "__main__":
    main()
