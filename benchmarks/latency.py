# SPDX-License-Identifier: Apache-2.0
"""Measures one tiny allreduce: on idle cores, with and without spinning, and on busy cores.

    mpirun -np 2 --bind-to none python benchmarks/latency.py [--calls 2000] [--turns 6]

Idle: blocking in-place float32 sums of 4 B. farandole (FARANDOLE_SPIN_US=0, 50) and gloo alternate
in one run. Ratios compare medians of all calls on all ranks. Busy: every main thread computes all
the time. Flight recorders, which share a clock, give the time from the last rank's submit until
each rank's background thread has the result. FARANDOLE_PRIORITY=realtime is measured, too, if
permitted. All results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import farandole
from farandole.observe.flight import own_page
from farandole.tools.bench_peers import GlooPeer
from farandole.tools.bench_report import settings
from farandole.tools.bench_timing import everywhere

SPINS = (0, 50)  # microseconds
BUSY_SECONDS = 0.004  # a rank submits in the first half of this; it computes four times as long


def start(**settings: str | int) -> None:
    """Restarts farandole with these settings, on the same ranks."""
    farandole.shutdown()
    os.environ.update({f"FARANDOLE_{name}": str(value) for name, value in settings.items()})
    farandole.init()


def in_real_time() -> bool:
    """True if the background threads of all ranks have realtime priority."""
    tasks = Path("/proc/self/task").iterdir()
    policies = [os.sched_getscheduler(int(task.name)) & ~os.SCHED_RESET_ON_FORK for task in tasks]
    return bool(everywhere([os.SCHED_RR in policies]).all())


def blocking(call: Any, calls: int) -> tuple[list[float], int]:
    """Returns the seconds of each call, and the number of wrong results."""
    ranks = farandole.size()
    times, wrong = [], 0
    for i in range(calls):
        begin = perf_counter()
        value = call(float(farandole.rank() + i % 100))
        times.append(perf_counter() - begin)
        wrong += value != ranks * (ranks - 1) / 2 + ranks * (i % 100)
    return times[calls // 10 :], wrong


def ours() -> Any:
    x = np.zeros(1, np.float32)

    def call(value: float) -> float:
        x[0] = value
        farandole.allreduce_(x, op=farandole.Sum, name="scalar")
        return float(x[0])

    return call


def theirs() -> Any:
    x = torch.zeros(1)

    def call(value: float) -> float:
        x[0] = value
        dist.all_reduce(x)
        return float(x)

    return call


def compute_until(end: float) -> None:
    x = np.ones((24, 24))
    while perf_counter() < end:
        x @ x


def busy(turns: int) -> tuple[list[float], int]:
    """Returns seconds from the last submit to this rank's result, and the number of wrong results.

    Ranks share a clock. With fewer cores than ranks, some ranks start a time slice late. All ranks
    still compute when the last one submits.
    """
    ranks, rank = farandole.size(), farandole.rank()
    jitter = random.Random(rank)
    pairs, wrong = [], 0
    for turn in range(turns):
        x = np.full(1, rank + turn, np.float32)
        begin = float(everywhere([perf_counter()]).max())
        compute_until(begin + BUSY_SECONDS * jitter.uniform(0.1, 0.5))
        handle = farandole.allreduce_async_(x, op=farandole.Sum, name="busy")
        compute_until(begin + 4 * BUSY_SECONDS)
        handle.wait()
        wrong += float(x[0]) != ranks * (ranks - 1) / 2 + ranks * turn
        events = {e["kind"]: e for e in own_page(8)["events"] if e.get("name") == "busy"}
        pairs.append((1e-9 * events["submit"]["t"], 1e-9 * events["done"]["t"]))
    submitted = everywhere([pair[0] for pair in pairs]).max(axis=0)
    done = np.array([pair[1] for pair in pairs])
    return list((done - submitted)[turns // 10 :]), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="total for each contestant")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    farandole.init()
    gloo = GlooPeer()
    times: dict[str, list[float]] = {"gloo": []}
    wrong = 0
    for _ in range(options.turns):
        for spin in SPINS:
            start(SPIN_US=spin)
            for name, make in ((f"farandole, spin {spin}", ours), ("gloo", theirs)):
                farandole.barrier()
                found, bad = blocking(make(), options.calls // options.turns)
                times.setdefault(name, []).extend(found)
                wrong += bad
    for name, priority in (("busy cores", "normal"), ("busy cores, realtime", "realtime")):
        start(SPIN_US=SPINS[0], PRIORITY=priority)
        farandole.barrier()
        if priority == "realtime" and not in_real_time():
            continue  # the runtime has logged the reason
        times[name], bad = busy(options.calls // 4)
        wrong += bad
    table = {name: 1e6 * everywhere(found).ravel() for name, found in times.items()}
    wrong = int(everywhere([wrong]).sum())
    found_settings = settings()
    if farandole.rank() == 0:
        for name, value in found_settings.items():
            print(f"# {name}: {value}")
        print(f"{'4 B, us':24} {'p50':>8} {'p90':>8} {'p99':>8}   p50 / gloo")
        for name, us in table.items():
            p50, p90, p99 = np.quantile(us, [0.5, 0.9, 0.99])
            ratio = "" if "spin" not in name else f"{p50 / np.median(table['gloo']):12.2f}"
            print(f"{name:24} {p50:8.1f} {p90:8.1f} {p99:8.1f} {ratio}")
        print(f"# wrong: {wrong}")
        if options.json is not None:
            rows = {name: us.tolist() for name, us in table.items()}
            options.json.write_text(json.dumps({"settings": found_settings, "us": rows}, indent=1))
    gloo.close()
    farandole.shutdown()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
