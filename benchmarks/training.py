# SPDX-License-Identifier: Apache-2.0
"""Measures the communication time of a training step that no computing hides.

    mpirun -np 2 --bind-to none python benchmarks/training.py [--turns 60] [--json F] [--plot F]

A ResNet-18 and a small transformer (small_nets.py), SGD with momentum, one torch thread per rank.
In each turn every contestant makes one step (forward, backward, update) on the same data: alone
(without communication), farandole's DistributedOptimizer (ordinary, and with gradients as views of
shared memory), DistributedDataParallel over gloo. A step's time is that of the slowest rank.
Exposed communication is a turn's step minus the step alone: the median over the turns, with the
95 % interval of a paired bootstrap. Checks that losses are equal on all ranks, and parameters equal
to DDP's.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap
from small_nets import TASKS, Task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Contestant, Row, finish, print_head, take_turns

import farandole.torch as hvd
from farandole.tools.bench_peers import GlooPeer

ALONE, OURS, VIEWS, DDP = "alone", "farandole", "farandole, views", "DDP"
_TOLERANCE = 1e-5  # sums of two ranks may be rounded differently


class Trainer:
    """One contestant: its copy of the net, and its turn."""

    def __init__(self, task: Task, who: str, idle: Callable[[], object] = lambda: None) -> None:
        """`idle` waits until the device is idle, before and after each timed step."""
        self._idle = idle
        torch.manual_seed(7)  # the same weights for all contestants, on all ranks
        self.net = task.net()
        self._task, self._step = task, 0
        self._call: nn.Module = self.net
        self.optimizer: Any = self.optimizer_of(who)

    def optimizer_of(self, who: str) -> Any:
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        if who == DDP:
            known = inspect.signature(DistributedDataParallel).parameters
            newest, before = "forward_sync_buffers", "broadcast_buffers"  # torch 2.13 renamed it
            buffers: Any = {newest if newest in known else before: False}
            self._call = DistributedDataParallel(self.net, gradient_as_bucket_view=True, **buffers)
        if who in (ALONE, DDP):
            return sgd
        named = self.net.named_parameters()
        return hvd.DistributedOptimizer(sgd, named, gradient_as_bucket_view=who == VIEWS)

    def contestant(self) -> Contestant:
        """Results are checked at the end, over all steps together."""
        return Contestant(self._prepare, self._run, lambda: 0)

    def _prepare(self) -> None:
        self._data = self._task.data(hvd.rank(), self._step)
        self._step += 1
        self._idle()

    def _run(self) -> float:
        start = perf_counter()
        self.optimizer.zero_grad()
        self._task.loss(self._call, self._data).backward()
        self.optimizer.step()
        self._idle()
        return perf_counter() - start

    def final_loss(self) -> float:
        """Loss of a batch that is the same on all ranks."""
        with torch.no_grad():
            return float(self._task.loss(self.net, self._task.data(0, -1)))


def compete(
    task: Task,
    turns: int,
    idle: Callable[[], object] = lambda: None,
    tolerance: float = _TOLERANCE,
) -> list[Row]:
    """All contestants on one task. `tolerance`: of parameters, compared with DDP's."""
    trainers = {name: Trainer(task, name, idle) for name in (ALONE, OURS, VIEWS, DDP)}
    contestants = {name: trainer.contestant() for name, trainer in trainers.items()}
    rows = take_turns(task.name, contestants, turns, over=np.max)
    for row in rows:
        if row.who != ALONE:
            row.wrong += _unequal(trainers[row.who], trainers[DDP], tolerance)
    return rows


def _unequal(trainer: Trainer, reference: Trainer, tolerance: float) -> int:
    """Number of parameters that differ from the reference's, plus 1 if the ranks' losses differ."""
    pairs = zip(trainer.net.parameters(), reference.net.parameters(), strict=True)
    wrong = sum(not torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in pairs)
    losses = hvd.allgather_object(trainer.final_loss())
    return wrong + int(len(set(losses)) > 1 or not np.isfinite(losses[0]))


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, statistic: Callable[..., Any], *samples: np.ndarray) -> Interval:
        """Bootstraps a statistic of samples that are paired by turn."""
        found = bootstrap(
            samples, statistic, paired=True, n_resamples=2000, method="percentile", rng=7
        ).confidence_interval
        return cls(float(statistic(*samples)), float(found.low), float(found.high))

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def _exposed(step: np.ndarray, alone: np.ndarray, axis: int = -1) -> Any:
    return 1e3 * np.median(step - alone, axis=axis)


def _of_ddp(step: np.ndarray, alone: np.ndarray, ddp: np.ndarray, axis: int = -1) -> Any:
    return np.median(step - alone, axis=axis) / np.median(ddp - alone, axis=axis)


def show(task: Task, rows: list[Row]) -> dict[str, Interval]:
    """Prints one task's table. Returns the exposed milliseconds of each contestant."""
    seconds = {row.who: row.seconds for row in rows}
    exposed = {}
    for row in rows:
        rate = task.per_batch * hvd.size() / row.median
        cells = f"{task.name:26} {row.who:18} {1e3 * row.median:9.1f} {rate:10.1f} {row.wrong:6}"
        if row.who != ALONE:
            exposed[row.who] = Interval.of(_exposed, row.seconds, seconds[ALONE])
            cells += f"  {exposed[row.who]!s:24}"
        if row.who.startswith(OURS):
            ratio = Interval.of(_of_ddp, row.seconds, seconds[ALONE], seconds[DDP])
            cells += f" {ratio} x DDP"
        if hvd.rank() == 0:
            print(cells, flush=True)
    return exposed


def plot(path: Path, found: dict[str, dict[str, Interval]], ranks: int) -> None:
    """Exposed milliseconds as bars with their intervals, a group for each task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(found.values())))
    for i, name in enumerate(names):
        bars = [task[name] for task in found.values()]
        values = np.array([bar.value for bar in bars])
        errors = [values - [b.low for b in bars], np.array([b.high for b in bars]) - values]
        places = np.arange(len(bars)) + (i - (len(names) - 1) / 2) * 0.25
        drawn = axes.bar(places, values, 0.22, yerr=np.maximum(errors, 0), capsize=3)
        label = name.replace(", ", ",\n")
        axes.bar_label(drawn, [f"{label}\n{value:.1f} ms" for value in values], padding=4)
    axes.set_ylim(0, 1.2 * max(bar.high for task in found.values() for bar in task.values()))
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("exposed communication, ms a step")
    axes.set_title(f"{ranks} ranks, 95 % intervals; less is better")
    figure.savefig(path, dpi=200)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    gloo = GlooPeer()
    print_head(
        f"{'net':26} {'who':18} {'step ms':>9} {'a second':>10} {'wrong':>6}  exposed ms [95 %]"
    )
    rows: list[Row] = []
    found = {}
    for task in TASKS:
        rows += (of_task := compete(task, options.turns))
        found[task.name] = show(task, of_task)
    if options.plot is not None and hvd.rank() == 0:
        plot(options.plot, found, hvd.size())
    exposed = {
        task: {who: vars(interval) for who, interval in of_task.items()}
        for task, of_task in found.items()
    }
    code = finish(rows, options.json, exposed_ms=exposed)
    gloo.close()
    hvd.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
