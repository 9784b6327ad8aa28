# SPDX-License-Identifier: Apache-2.0
"""Measures small allreduces between computations, as in programs. Peers alternate.

    mpirun -np 2 --bind-to none python benchmarks/small_calls.py [--turns 300] [--compute 0 300]
                                                 [--sizes 4 4K 64K 1M] [--read MIB] [--json F]

In its turn, a contestant's program alters the buffer, reads --read MiB of other memory, meets the
other ranks in MPI's barrier, computes, and calls. A row shows seconds from the last rank's call
until all ranks have the result: the cost of the collective once all ranks have come. A rank
computes matrix products for --compute microseconds, plus up to a tenth that differs by rank and
turn. "core" is farandole's C call without the adapter's Python. All settings are the defaults.
Every result is checked.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from turns import Row, print_head, save

import farandole
import farandole.torch as hvd
from farandole.calls.handles import wait_until
from farandole.calls.leases import end
from farandole.calls.requests import Call as CoreCall
from farandole.calls.requests import Op, PreparedCall
from farandole.tools.bench_peers import GlooPeer
from farandole.tools.bench_report import size_text
from farandole.tools.bench_timing import everywhere
from farandole.torch.kind import describe

SIZES = ("4", "4K", "64K", "1M")
COMPUTE_US = (0, 300, 2000)
UNITS = {"K": 10, "M": 20}
WARM = 20  # turns that are not counted: in its first calls a name goes to the coordinator

Call = Callable[[], object]


def bytes_of(text: str) -> int:
    """4K is 4096."""
    unit = UNITS.get(text[-1:].upper(), 0)
    return int(text[:-1] if unit else text) << unit


def contestants(nbytes: int, group: Any) -> dict[str, tuple[torch.Tensor, Call]]:
    """For each contestant: the buffer that the program alters, and the call that sums it in
    place."""
    by_core, by_torch, by_numpy, by_dist, by_gloo, by_mpi = (
        torch.zeros(max(1, nbytes // 4)) for _ in range(6)
    )
    array, mpi = by_numpy.numpy(), by_mpi.numpy()
    name = f"small {nbytes}"
    return {
        "farandole, core": (by_core, core_call(f"{name} core", by_core)),
        "farandole, torch": (
            by_torch,
            lambda: hvd.allreduce_(by_torch, op=hvd.Sum, name=f"{name} torch"),
        ),
        "farandole, NumPy": (
            by_numpy,
            lambda: farandole.allreduce_(array, op=farandole.Sum, name=f"{name} numpy"),
        ),
        "farandole, c10d": (by_dist, lambda: dist.all_reduce(by_dist, group=group)),
        "mpi": (by_mpi, lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, mpi, MPI.SUM)),
        "gloo": (by_gloo, lambda: dist.all_reduce(by_gloo)),
    }


def core_call(name: str, x: torch.Tensor) -> Call:
    """The core's sum of `x` in place, without the adapters' Python: one call through cffi."""
    prepared = PreparedCall(CoreCall(Op.ALLREDUCE, name), describe(x))
    address = x.data_ptr()

    def call() -> None:
        if number := prepared.call(address, address):  # not done yet
            wait_until((number,), None)
            end((number,))

    return call


def compute(seconds: float) -> None:
    """Keeps this core busy until `seconds` have passed."""
    end = perf_counter() + seconds
    x = np.ones((24, 24))
    while perf_counter() < end:
        x @ x


def turn(
    x: torch.Tensor, call: Call, number: int, seconds: float, others: torch.Tensor
) -> tuple[float, float, bool]:
    """Times of this rank's call and its result, by a clock that the host's ranks share; True if the
    result is wrong. The rank reads `others` first."""
    ranks = farandole.size()
    x.fill_(farandole.rank() + number % 100)
    others.sum()
    MPI.COMM_WORLD.Barrier()
    compute(seconds)
    began = perf_counter()
    call()
    ended = perf_counter()
    right = ranks * (ranks - 1) / 2 + ranks * (number % 100)
    return began, ended, bool((x != right).any())


def measure(
    nbytes: int, compute_us: int, turns: int, group: Any, others: torch.Tensor
) -> list[Row]:
    """Measures each contestant in each turn, in an order that changes. Collective."""
    what = f"{size_text(nbytes)}, after {compute_us} us"
    made = contestants(nbytes, group)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    wrong = dict.fromkeys(made, 0)
    order, jitter = random.Random(0), random.Random(farandole.rank())
    names = list(made)
    for number in range(WARM + turns):
        order.shuffle(names)
        for name in names:
            seconds = 1e-6 * compute_us * jitter.uniform(1, 1.1)
            began, ended, bad = turn(*made[name], number, seconds, others)
            wrong[name] += bad
            if number >= WARM:
                times[name].append((began, ended))
    rows = []
    for name, pairs in times.items():
        begins, ends = (everywhere(moments) for moments in zip(*pairs, strict=True))
        after_last = ends.max(axis=0) - begins.max(axis=0)
        rows.append(Row(what, name, after_last, int(everywhere([wrong[name]]).sum())))
    return rows


def show(rows: Sequence[Row]) -> None:
    """Quantiles in microseconds; ratios of medians to MPI's and Gloo's."""
    if farandole.rank() != 0:
        return
    medians = {row.who: row.median for row in rows}
    for row in rows:
        us = [1e6 * float(np.quantile(row.seconds, q)) for q in (0.1, 0.5, 0.9)]
        line = f"{row.what:24} {row.who:18}" + "".join(f"{x:10.1f}" for x in us)
        ratios = [f"{row.median / medians[peer]:8.2f}" for peer in ("mpi", "gloo")]
        print(f"{line}{row.wrong:8}" + "".join(ratios), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--compute", type=int, nargs="+", default=COMPUTE_US, metavar="US")
    parser.add_argument("--sizes", type=bytes_of, nargs="+", default=[*map(bytes_of, SIZES)])
    parser.add_argument("--read", type=int, default=0, metavar="MIB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    gloo = GlooPeer()
    group = dist.new_group(backend="farandole")
    print_head(
        f"{'allreduce':24} {'who':18}{'p10 us':>10}{'p50 us':>10}{'p90 us':>10}{'wrong':>8}"
        f"{'x mpi':>8}{'x gloo':>8}"
    )
    rows, others = [], torch.ones(options.read << 18)
    for nbytes in options.sizes:
        for compute_us in options.compute:
            found = measure(nbytes, compute_us, options.turns, group, others)
            show(found)
            rows += found
    save(rows, options.json)
    dist.destroy_process_group(group)
    gloo.close()
    hvd.shutdown()
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
