# SPDX-License-Identifier: Apache-2.0
"""Measures the time that each call takes to look up the line that makes it.

    python benchmarks/call_sites.py [--turns 40] [--calls 500]

Makes unnamed calls in a world of one rank, alternately with FARANDOLE_CALL_SITES=warn and =off,
each after an init(). Measures time.thread_time of the calling thread for one call and its wait.
Prints the 5 % quantile over the turns, and the difference.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import farandole as fd
import farandole.torch as hvd

FASTEST = 0.05


def timed(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call, after some calls that are not counted."""
    for _ in range(20):
        call()
    start = thread_time()
    for _ in range(calls):
        call()
    return (thread_time() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    array, tensor = np.zeros(16, np.float32), torch.zeros(16)
    kinds: dict[str, Callable[[], Any]] = {
        "farandole.allreduce_": lambda: fd.allreduce_(array),
        "farandole.allgather": lambda: fd.allgather(array),
        "farandole.torch.allreduce_": lambda: hvd.allreduce_(tensor),
        "farandole.torch.allreduce": lambda: hvd.allreduce(tensor),
        "torch.distributed.all_reduce": lambda: dist.all_reduce(tensor),
    }
    times: dict[tuple[str, str], list[float]] = {}
    gc.disable()
    for turn in range(options.turns):
        for mode in ("off", "warn") if turn % 2 else ("warn", "off"):
            os.environ["FARANDOLE_CALL_SITES"] = mode
            fd.init()
            dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
            for kind, call in kinds.items():
                times.setdefault((kind, mode), []).append(timed(call, options.calls))
            dist.destroy_process_group()
            fd.shutdown()
        gc.collect()
    print(f"thread CPU us of a call, the fastest {FASTEST:.0%} of {options.turns} turns")
    print(f"{'':30} {'off':>8} {'warn':>8} {'difference':>11}")
    for kind in kinds:
        off, warn = (1e6 * np.quantile(times[kind, mode], FASTEST) for mode in ("off", "warn"))
        print(f"{kind:30} {off:8.2f} {warn:8.2f} {warn - off:11.2f}")


if __name__ == "__main__":
    main()
