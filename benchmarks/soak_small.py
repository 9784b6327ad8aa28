# SPDX-License-Identifier: Apache-2.0
"""Makes random small calls while buckets are under way, and checks every result.

    mpirun -np 3 --bind-to none python benchmarks/soak_small.py [--seconds 300] [--seed 0]

All ranks draw the same calls: kinds, sizes, names, process sets, blocking or asynchronous, and some
wrong ones. Each rank draws its own delays, of up to 5 ms, so that calls meet in a cell, leave it,
or never enter it. Meanwhile buckets of megabytes are under way, and a second thread makes calls (on
three ranks or more, in another process set). Data differ by rank and turn.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

import farandole as fd
import farandole.torch as hvd

SIZES = (1, 7, 100, 1000, 4096, 16_384, 32_768, 40_000)  # elements, of 4 bytes
BUCKET = 500_000


def values(rank: int, turn: int, elements: int) -> torch.Tensor:
    """Whole numbers, so that every order of adding gives the same."""
    return torch.arange(elements, dtype=torch.float32) % 97 + float(rank * 3 + turn % 1000)


def total(ranks: list[int], turn: int, elements: int) -> torch.Tensor:
    return torch.stack([values(rank, turn, elements) for rank in ranks]).sum(0)


class Soak:
    """The calls of one rank; `draw` is the same on all ranks, `own` is not."""

    def __init__(self, seed: int) -> None:
        self.draw, self.own = random.Random(seed), random.Random(1000 * seed + hvd.rank())
        self.turn = 0
        self.all = list(range(hvd.size()))
        self.group = dist.new_group(backend="farandole")
        self.sets: list[tuple[hvd.ProcessSet, list[int]]] = [(hvd.global_process_set, self.all)]
        for ranks in (self.all[:-1], self.all[1:]):
            if len(ranks) > 1:
                self.sets.append((hvd.add_process_set(ranks), ranks))
        self.done: Counter[str] = Counter()
        self.buckets: list[tuple[Any, int]] = []
        self.kinds: tuple[Callable[[int], None], ...] = (
            *(self.allreduce,) * 4,
            *(self.of_torch,) * 4,
            self.broadcast,
            self.barrier,
            self.asynchronous,
            self.bucket,
            self.wrong,
        )

    def check(self, what: str, found: torch.Tensor, right: torch.Tensor) -> None:
        self.done[what] += 1
        if not torch.equal(found, right):
            sys.exit(f"rank {hvd.rank()}, turn {self.turn}, {what}: {found} is not {right}")

    def step(self) -> None:
        """One call of a kind and size that all ranks draw alike."""
        self.turn += 1
        kind, elements = self.draw.choice(self.kinds), self.draw.choice(SIZES)
        if self.own.random() < 0.05:
            sleep(self.own.uniform(0, 0.005))
        kind(elements)

    def allreduce(self, elements: int) -> None:
        process_set, ranks = self.draw.choice(self.sets)
        name = self.draw.choice((None, f"soak {elements}"))
        if hvd.rank() in ranks:
            x = values(hvd.rank(), self.turn, elements)
            y = hvd.allreduce(x, op=hvd.Sum, name=name, process_set=process_set)
            self.check("allreduce", y, total(ranks, self.turn, elements))

    def asynchronous(self, elements: int) -> None:
        """Calls asynchronously on one rank; the others block."""
        x = values(hvd.rank(), self.turn, elements)
        one = self.draw.choice(self.all) == hvd.rank()
        name = f"soak async {elements}"
        if one:
            y = hvd.allreduce_async_(x, op=hvd.Sum, name=name).wait()
        else:
            y = hvd.allreduce_(x, op=hvd.Sum, name=name)
        self.check("asynchronous", y, total(self.all, self.turn, elements))

    def broadcast(self, elements: int) -> None:
        root = self.draw.choice(self.all)
        y = hvd.broadcast(values(hvd.rank(), self.turn, elements), root, name=f"soak {root}")
        self.check("broadcast", y, values(root, self.turn, elements))

    def barrier(self, _: int) -> None:
        hvd.barrier() if self.draw.random() < 0.5 else dist.barrier(self.group)
        self.done["barrier"] += 1

    def of_torch(self, elements: int) -> None:
        blocks, which = self.draw.random() < 0.7, self.draw.randrange(4)
        mine, n = values(hvd.rank(), self.turn, elements), hvd.size()
        options: dict[str, Any] = {"group": self.group, "async_op": not blocks}
        if which == 0:
            work, y, right = dist.all_reduce(mine, **options), mine, self.sum_of(elements)
        elif which == 1:
            work, y = dist.broadcast(mine, n - 1, **options), mine
            right = values(n - 1, self.turn, elements)
        elif which == 2:
            y = torch.empty(n * elements)
            work = dist.all_gather_into_tensor(y, mine, **options)
            right = torch.cat([values(rank, self.turn, elements) for rank in self.all])
        else:
            y = torch.empty(elements)
            whole = values(hvd.rank(), self.turn, n * elements)
            work = dist.reduce_scatter_tensor(y, whole, **options)
            right = self.sum_of(n * elements)[hvd.rank() * elements :][:elements]
        if work is not None:
            work.wait()
        self.check(f"torch {which}", y, right)

    def sum_of(self, elements: int) -> torch.Tensor:
        return total(self.all, self.turn, elements)

    def bucket(self, _: int) -> None:
        """Starts a bucket. Waits for the oldest one if three are under way."""
        x = values(hvd.rank(), self.turn, BUCKET)
        begun = self.done["bucket"] + len(self.buckets)
        handle = hvd.allreduce_async_(x, op=hvd.Sum, name=f"bucket {begun % 3}")
        self.buckets.append((handle, self.turn))
        while len(self.buckets) > 2:
            handle, turn = self.buckets.pop(0)
            self.check("bucket", handle.wait(), total(self.all, turn, BUCKET))

    def wrong(self, elements: int) -> None:
        """Ranks pass different shapes, or one passes no array: all get an error."""
        bad: Any = values(hvd.rank(), self.turn, elements + hvd.rank())
        if self.draw.random() < 0.5:
            bad = "none" if self.draw.choice(self.all) == hvd.rank() else torch.ones(elements)
        try:
            hvd.allreduce(bad, op=hvd.Sum, name=f"soak {elements}")
        except (fd.MismatchError, TypeError, ValueError):
            self.done["wrong"] += 1
            return
        sys.exit(f"rank {hvd.rank()}, turn {self.turn}: a wrong call has succeeded")


def beside(
    process_set: hvd.ProcessSet, ranks: list[int], stop: threading.Event, wrong: list[Any]
) -> None:
    """Runs in a second thread: makes named calls in its set until all ranks have seen `stop`."""
    try:
        for turn in range(1 << 40):
            ends = hvd.allreduce(
                torch.tensor([float(stop.is_set()), hvd.rank() + turn % 1000.0]),
                op=hvd.Sum,
                name="beside",
                process_set=process_set,
            )
            if ends[1] != sum(rank + turn % 1000.0 for rank in ranks):
                wrong.append(ends)
            if ends[0] == len(ranks):
                return
    except Exception as reason:
        wrong.append(reason)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("farandole")
    soak = Soak(options.seed)
    stop, wrong = threading.Event(), list[Any]()
    ranks = [0, hvd.size() - 1]
    pair = hvd.add_process_set(ranks) if hvd.size() > 2 else hvd.global_process_set
    thread = threading.Thread(target=beside, args=(pair, ranks, stop, wrong))
    if hvd.rank() in ranks:
        thread.start()
    end = monotonic() + options.seconds
    while True:
        for _ in range(200):
            soak.step()
        ended = torch.tensor([float(monotonic() > end or len(wrong))])
        if hvd.allreduce(ended, op=hvd.Max, name="ended") > 0:
            break
    for handle, turn in soak.buckets:
        soak.check("bucket", handle.wait(), total(soak.all, turn, BUCKET))
    stop.set()
    if hvd.rank() in ranks:
        thread.join()
    if hvd.rank() == 0:
        print(f"{soak.turn} turns, errors: {len(wrong)}, calls: {dict(soak.done)}")
    dist.destroy_process_group()
    hvd.shutdown()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
