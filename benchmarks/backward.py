# SPDX-License-Identifier: Apache-2.0
"""Time that communication adds to a backward pass, with DistributedOptimizer and with DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter
from typing import Any

import resnet50
import torch
from torch.nn.parallel import DistributedDataParallel
from turns import Contestant, Row, minus, show, take_turns

import farandole.torch as hvd


class FarandoleHooks:
    """A model with a DistributedOptimizer; `view`: its gradient_as_bucket_view."""

    def __init__(self, shapes: Sequence[resnet50.Shape], device: str, view: bool) -> None:
        self.model = resnet50.Chain(shapes, hvd.rank(), device)
        self.call: Any = self.model
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer: Any = hvd.DistributedOptimizer(sgd, gradient_as_bucket_view=view)

    def no_sync(self) -> Any:
        return self.optimizer.no_sync()

    def end(self) -> None:
        self.optimizer.synchronize()


class Behind:
    """A model in DistributedDataParallel, with gradients as views of buckets that `group`
    reduces."""

    def __init__(self, model: Any, group: Any = None) -> None:
        self.model = model
        self.call = DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )

    def no_sync(self) -> Any:
        return self.call.no_sync()

    def end(self) -> None:
        pass


def _nothing() -> None:
    pass


def backward(
    what: str,
    shapes: Sequence[resnet50.Shape],
    turns: int,
    device: str = "cpu",
    idle: Callable[[], object] = _nothing,
    end: Callable[[], object] = _nothing,
) -> list[Row]:
    """A step's time minus that of the same step without communication.

    `idle` waits, untimed, until the device is idle. `end` runs within the timed step; without it, a
    step on a GPU is timed until the host has launched it.
    """
    names = ("farandole", "farandole, zero copy", "DDP")
    theirs = Behind(resnet50.Chain(shapes, hvd.rank(), device))
    makers = (FarandoleHooks(shapes, device, False), FarandoleHooks(shapes, device, True), theirs)
    return exposed(what, dict(zip(names, makers, strict=True)), turns, device, idle, end)


def exposed(
    what: str,
    makers: dict[str, Any],
    turns: int,
    device: str = "cpu",
    idle: Callable[[], object] = _nothing,
    end: Callable[[], object] = _nothing,
    budget: float = inf,
) -> list[Row]:
    """Like backward(), for other models, by name. `makers` have FarandoleHooks' attributes.
    `budget`: see take_turns()."""
    ranks = range(hvd.size())

    def contestants(who: Any) -> tuple[Contestant, Contestant]:
        x = torch.zeros((), requires_grad=True, device=device)

        def prepare() -> None:
            who.model.clear()
            idle()

        def step() -> float:
            start = perf_counter()
            who.call(x).backward()
            who.end()
            end()
            return perf_counter() - start

        def local() -> float:
            with who.no_sync():
                start = perf_counter()
                who.call(x).backward()
                end()
                return perf_counter() - start

        def local_wrong() -> int:
            return int(who.model.wrong([hvd.rank()]))

        return (
            Contestant(prepare, step, lambda: int(who.model.wrong(ranks))),
            Contestant(prepare, local, local_wrong),
        )

    turns_of = {}
    for name, who in makers.items():
        turns_of[f"step: {name}"], turns_of[f"local: {name}"] = contestants(who)
    row = {r.who: r for r in take_turns(what, turns_of, turns, budget=budget)}
    rows = [minus(row[f"step: {name}"], row[f"local: {name}"], name) for name in makers]
    show([*row.values(), *rows])
    return rows
