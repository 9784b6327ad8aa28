# SPDX-License-Identifier: Apache-2.0
"""Gradients of collectives as Horovod defines them: those of averages where it takes averages. What
was sent to a rank that has joined has a gradient of zeros, at its own place.

A loss is the sum of a result's rows, each times weight(rank, row). All columns are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import farandole as fd

__all__ = ["CASES", "Case", "weight"]

# Rows of this rank's input, the call of an adapter on it, and the gradient of each row.
Case = tuple[int, Callable[[Any, Any], Any], list[float]]


def weight(rank: int, row: int) -> float:
    """Factor of a row of that rank's result in its loss."""
    return row + 1.0 + 100 * rank


def _total(active: list[int], rows: int, begin: int = 0) -> list[float]:
    return [sum(weight(rank, begin + i) for rank in active) for i in range(rows)]


def _mean(active: list[int], rows: int, begin: int = 0) -> list[float]:
    return [one / fd.size() for one in _total(active, rows, begin)]


def _average(active: list[int]) -> Case:
    return 2, lambda hvd, x: hvd.allreduce(x, name="x"), _mean(active, 2)


def _scaled_sum(active: list[int]) -> Case:
    factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    call = lambda hvd, x: hvd.allreduce(x, name="x", op=fd.Sum, **factors)  # noqa: E731
    return 2, call, [2 * one for one in _total(active, 2)]


def _group_of_averages(active: list[int]) -> Case:
    def call(hvd: Any, x: Any) -> Any:
        first, second = hvd.grouped_allreduce([x, 3.0 * x], name="x")
        return first + second

    return 2, call, [4 * one for one in _mean(active, 2)]


def _allgather(active: list[int], group: bool = False) -> Case:
    def call(hvd: Any, x: Any) -> Any:
        return hvd.grouped_allgather([x, x[:1]], name="x")[0] if group else hvd.allgather(x, "x")

    begin = sum(rank + 1 for rank in active if rank < fd.rank())
    return fd.rank() + 1, call, _mean(active, fd.rank() + 1, begin)


def _broadcast(active: list[int]) -> Case:
    root = active[-1]
    right = _mean(active, 2) if fd.rank() == root else [0.0, 0.0]
    return 2, lambda hvd, x: hvd.broadcast(x, root, name="x"), right


def _alltoall(active: list[int], splits: list[int], unsent: int) -> Case:
    def call(hvd: Any, x: Any) -> Any:
        return hvd.alltoall(x, splits, name="x")[0] if unsent else hvd.alltoall(x, name="x")

    right = [0.0] * unsent
    for to, rows in reversed([*enumerate(splits)]):
        at = active.index(fd.rank()) * rows  # of this rank's rows in the result of `to`
        right[:0] = [weight(to, at + i) if to in active else 0.0 for i in range(rows)]
    return len(right), call, right


def _reducescatter(active: list[int], op: int, group: bool, **factors: float) -> Case:
    def call(hvd: Any, x: Any) -> Any:
        options = {"name": "x", "op": op, **factors}
        if group:
            return hvd.grouped_reducescatter([x, x[:1]], **options)[0]
        return hvd.reducescatter(x, **options)

    size = fd.size()
    scale = factors.get("postscale_factor", 1.0) * (size if op == fd.Sum else 1)
    counts = [2] * (size - 1) + [1]  # the last rank gets one row
    sent = [weight(to, i) if to in active else 0.0 for to in range(size) for i in range(counts[to])]
    return sum(counts), call, [scale * one for one in sent]


# By the ranks that have not joined.
CASES: dict[str, Callable[[list[int]], Case]] = {
    "average": _average,
    "scaled sum": _scaled_sum,
    "group of averages": _group_of_averages,
    "allgather": _allgather,
    "group of allgathers": lambda active: _allgather(active, True),
    "broadcast": _broadcast,
    "alltoall": lambda active: _alltoall(active, [2] * fd.size(), 0),
    "alltoall by splits": lambda active: _alltoall(active, [*range(1, fd.size() + 1)], 3),
    "reducescatter": lambda active: _reducescatter(active, fd.Average, False),
    "sum scattered": lambda active: _reducescatter(active, fd.Sum, False, postscale_factor=4.0),
    "group of reducescatters": lambda active: _reducescatter(active, fd.Sum, True),
}
