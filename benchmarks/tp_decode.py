# SPDX-License-Identifier: Apache-2.0
"""Times the calls of tensor parallelism and SyncBatchNorm, without their models. Peers alternate.

    mpirun -np 2 --bind-to none python benchmarks/tp_decode.py [--turns 100] [--compute 0 50]
                                                               [--json F]

One turn of a contestant is
- decode: one token of a transformer that is split by tensor parallelism: 100 allreduces of 64 KB,
  two for each of 50 layers;
- batch norm: one step of ResNet-50 with SyncBatchNorm: for each of its 53 layers of C channels, an
  allreduce of 2 C + 1 sums in the forward pass, and one of 2 C in the backward pass.

Before every call the rank computes for --compute microseconds. The last call of each turn is
checked; the buffers differ by rank and turn. All settings are the defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import _functional_collectives as functional
from turns import Contestant, Row, finish, head, show, take_turns

import farandole
import farandole.torch as hvd
from farandole.tools.bench_peers import GlooPeer

DECODE = (64 << 10 >> 2,) * 100  # elements of each call, float32
# (width, number of blocks, output channels) of each stage of ResNet-50.
_BLOCKS = ((64, 3, 256), (128, 4, 512), (256, 6, 1024), (512, 3, 2048))
CHANNELS = (64, *(c for w, n, out in _BLOCKS for c in (*((w, w, out) * n), out)))
BATCH_NORM = (*(2 * c + 1 for c in CHANNELS), *(2 * c for c in reversed(CHANNELS)))


def compute(seconds: float) -> None:
    """Keeps this core busy until `seconds` have passed."""
    if seconds <= 0:
        return
    end = perf_counter() + seconds
    x = np.ones((24, 24))
    while perf_counter() < end:
        x @ x


class Calls(Contestant):
    """Makes calls one after another, in place, with one buffer for each length."""

    def __init__(
        self, lengths: tuple[int, ...], seconds: float, call: Callable[[torch.Tensor], object]
    ) -> None:
        self.turn = 0
        self.lengths = lengths
        self.buffers = {n: torch.zeros(n) for n in set(lengths)}

        def run() -> float:
            began = perf_counter()
            for n in lengths[:-1]:
                self.buffers[n].fill_(1.0)  # sums of sums would overflow
                compute(seconds)
                call(self.buffers[n])
            last = self.buffers[lengths[-1]]
            last.fill_(self.value(farandole.rank()))
            compute(seconds)
            call(last)
            return perf_counter() - began

        super().__init__(self.alter, run, self.count_wrong)

    def value(self, rank: int) -> float:
        """A rank's value in the last call of this turn."""
        return 1.0 + rank + self.turn % 100

    def alter(self) -> None:
        self.turn += 1

    def count_wrong(self) -> int:
        total = sum(map(self.value, range(farandole.size())))
        return int((self.buffers[self.lengths[-1]] != total).sum())


def by_functional(group: Any) -> Callable[[torch.Tensor], object]:
    """Calls like torch.distributed.tensor.parallel: starts, waits, and gets a new tensor."""

    def call(x: torch.Tensor) -> None:
        x.copy_(functional.wait_tensor(functional.all_reduce(x, "sum", group)))

    return call


def contestants(lengths: tuple[int, ...], seconds: float, group: Any) -> dict[str, Contestant]:
    world = MPI.COMM_WORLD
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "farandole": lambda x: hvd.allreduce_(x, op=hvd.Sum, name=f"tp {len(x)}"),
        "farandole, c10d": lambda x: dist.all_reduce(x, group=group),
        "farandole, functional": by_functional(group),
        "gloo": dist.all_reduce,
        "gloo, functional": by_functional(dist.group.WORLD),
        "mpi": lambda x: world.Allreduce(MPI.IN_PLACE, x.numpy(), MPI.SUM),
    }
    return {name: Calls(lengths, seconds, call) for name, call in calls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--compute", type=int, nargs="+", default=[0, 50], metavar="US")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    gloo = GlooPeer()
    group = dist.new_group(backend="farandole")
    head()
    rows: list[Row] = []
    for what, lengths in (("decode", DECODE), ("batch norm", BATCH_NORM)):
        for us in options.compute:
            found = take_turns(
                f"{what}, {us} us between",
                contestants(lengths, 1e-6 * us, group),
                options.turns,
                over=np.max,
            )
            show(found)
            rows += found
    failed = finish(rows, options.json)
    dist.destroy_process_group(group)
    gloo.close()
    hvd.shutdown()
    return failed


if __name__ == "__main__":
    sys.exit(main())
