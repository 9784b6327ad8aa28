# SPDX-License-Identifier: Apache-2.0
"""The cases of `farandole bench`: collectives, their data, and their right results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Prime, so that elements moved by a block, stripe or page are noticed; and small, so that sums of
# a few ranks are exact in every dtype.
_PERIOD = 13
_CHUNK = _PERIOD << 13  # elements compared at once
_MOST_CALLS = 50

# Bits by which a value may grow from 1.
DTYPES = {"float16": 15, "float32": 127, "float64": 1023}


@dataclass(frozen=True)
class Collective:
    """One operation. Sizes are those of the largest buffer of a rank, as in nccl-tests."""

    name: str
    bus: Callable[[int], float]  # bus bandwidth / algorithm bandwidth, for n ranks
    split: bool = False  # the buffer has equal parts, one per rank


COLLECTIVES = {
    c.name: c
    for c in (
        Collective("allreduce", lambda n: 2 * (n - 1) / n),
        Collective("broadcast", lambda n: 1.0),
        Collective("allgather", lambda n: (n - 1) / n, split=True),
        Collective("reducescatter", lambda n: (n - 1) / n, split=True),
        Collective("alltoall", lambda n: (n - 1) / n, split=True),
    )
}


@dataclass(frozen=True)
class Case:
    """One collective on `count` elements; `rank` is this one of `size`."""

    collective: Collective
    dtype: str
    count: int
    rank: int
    size: int

    @classmethod
    def of(cls, name: str, dtype: str, nbytes: int, rank: int, size: int) -> Case:
        """The case nearest to `nbytes`: at least one element, and equal parts if it is split."""
        collective = COLLECTIVES[name]
        parts = size if collective.split else 1
        count = max(1, nbytes // np.dtype(dtype).itemsize // parts) * parts
        return cls(collective, dtype, count, rank, size)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer."""
        return self.count * np.dtype(self.dtype).itemsize

    @property
    def output_count(self) -> int:
        """Elements of a rank's result."""
        scatters = self.collective.name == "reducescatter"
        return self.count // self.size if scatters else self.count


def calls_between_fills(case: Case) -> int:
    """How many in-place sums the dtype can hold before the values overflow."""
    if case.collective.name != "allreduce" or case.size == 1:
        return _MOST_CALLS
    room = (DTYPES[case.dtype] - math.log2(_PERIOD * case.size)) / math.log2(case.size)
    if _rounding(case) > 0:
        room = min(room, 0.1 / _rounding(case))
    return max(2, min(_MOST_CALLS, int(room)))


def _rounding(case: Case) -> float:
    """The relative error that a right implementation may make in one call: 0 for whole numbers
    that the dtype can represent, else half a unit in the last place for each addition."""
    unit = float(np.finfo(case.dtype).eps)
    exact = case.size & (case.size - 1) == 0 and _PERIOD * case.size <= 2 / unit
    return 0.0 if exact else 0.5 * unit * case.size


class Operand:
    """A rank's input: small whole numbers computed from rank and index."""

    def __init__(self, case: Case) -> None:
        """Not filled until fill()."""
        self.case = case
        gathers = case.collective.name == "allgather"
        count = case.count // case.size if gathers else case.count
        self.array: Array = np.empty(count, case.dtype)

    def fill(self) -> None:
        """Writes this rank's values."""
        chunk = self._stored(np.resize(_values(self.case.rank), _CHUNK))
        for start in range(0, self.array.size, _CHUNK):
            part = self.array[start : start + _CHUNK]
            part[:] = chunk[: part.size]

    def wrong(self, output: Array, calls: int) -> int:
        """The number of wrong elements in the result of the last of `calls` calls since fill()."""
        blocks = self._expected(calls)
        length = output.size // len(blocks)
        if length * len(blocks) != output.size or output.size != self.case.output_count:
            return max(output.size, 1)
        parts = [output[i * length : (i + 1) * length] for i in range(len(blocks))]
        return sum(self._differ(*pair, calls) for pair in zip(parts, blocks, strict=True))

    def _expected(self, calls: int) -> list[Array]:
        """One period of the result's values, for each of its equal blocks."""
        case, name = self.case, self.case.collective.name
        ranks = range(case.size)
        mine = case.rank * (case.count // case.size)  # where this rank's part begins
        if name == "broadcast":
            return [_values(0)]
        if name == "allgather":
            return [_values(r) for r in ranks]
        if name == "alltoall":
            return [_values(r, mine) for r in ranks]
        total = np.sum([_values(r, mine if case.collective.split else 0) for r in ranks], axis=0)
        if name == "allreduce":  # each further call multiplies by the number of ranks
            return [total * float(case.size) ** (calls - 1)]
        return [total]

    def _stored(self, values: Array) -> Array:
        """Values converted to the array's dtype."""
        with np.errstate(over="ignore"):
            return values.astype(self.array.dtype)

    def _differ(self, got: Array, period: Array, calls: int) -> int:
        """The number of elements that differ from `period`, repeated."""
        wanted = self._stored(np.resize(period, _CHUNK))
        count = 0
        for start in range(0, got.size, _CHUNK):
            part = got[start : start + _CHUNK]
            if not np.array_equal(part, wanted[: part.size]):
                count += self._beyond_rounding(part, wanted[: part.size], calls)
        return count

    def _beyond_rounding(self, got: Array, wanted: Array, calls: int) -> int:
        g, w = got.astype(np.float64), wanted.astype(np.float64)
        error = calls * _rounding(self.case)
        right = g == w
        if error > 0:
            right |= np.abs(g - w) <= error * np.abs(w)
        return int(np.count_nonzero(~right))


def _values(rank: int, start: int = 0) -> Array:
    """One period of a rank's values from element `start` on."""
    return (np.arange(start, start + _PERIOD) + 5 * rank) % _PERIOD + 1
