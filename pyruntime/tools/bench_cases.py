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
DTYPES = {
    "uint8": 8,
    "int8": 7,
    "int32": 31,
    "uint32": 32,
    "int64": 63,
    "uint64": 64,
    "float16": 15,
    "bfloat16": 127,
    "float32": 127,
    "float64": 1023,
}


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
        return cls(collective, dtype, max(1, nbytes // width(dtype) // parts) * parts, rank, size)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer."""
        return self.count * width(self.dtype)

    @property
    def output_count(self) -> int:
        """Elements of a rank's result."""
        scatters = self.collective.name == "reducescatter"
        return self.count // self.size if scatters else self.count


def width(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


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
    if "int" in case.dtype:
        return 0.0
    unit = 2.0**-7 if case.dtype == "bfloat16" else float(np.finfo(case.dtype).eps)
    exact = case.size & (case.size - 1) == 0 and _PERIOD * case.size <= 2 / unit
    return 0.0 if exact else 0.5 * unit * case.size


class Operand:
    """A rank's input: small whole numbers computed from rank and index.

    NumPy has no bfloat16: such values are stored as the upper halves of float32.
    """

    def __init__(self, case: Case) -> None:
        """Not filled until fill()."""
        self.case = case
        self._halves = case.dtype == "bfloat16"
        gathers = case.collective.name == "allgather"
        count = case.count // case.size if gathers else case.count
        self.array: Array = np.empty(count, np.uint16 if self._halves else np.dtype(case.dtype))

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
            return [self._grown(total, calls - 1)]
        return [total]

    def _grown(self, total: Array, times: int) -> Array:
        if "int" in self.case.dtype:  # integers wrap around
            factor = np.uint64(pow(self.case.size, times, 1 << 64))
            return np.asarray(total.astype(np.uint64) * factor)
        return np.asarray(total * float(self.case.size) ** times)

    def _stored(self, values: Array) -> Array:
        """Values converted to the array's dtype."""
        if self._halves:
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        with np.errstate(over="ignore"):
            return values.astype(self.array.dtype)

    def _plain(self, stored: Array) -> Array:
        if self._halves:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored

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
        g, w = got, wanted
        if "int" not in self.case.dtype:
            g, w = (self._plain(x).astype(np.float64) for x in (got, wanted))
        error = calls * _rounding(self.case)
        right = g == w
        if error > 0:
            right |= np.abs(g - w) <= error * np.abs(w)
        return int(np.count_nonzero(~right))


def _values(rank: int, start: int = 0) -> Array:
    """One period of a rank's values from element `start` on."""
    return (np.arange(start, start + _PERIOD) + 5 * rank) % _PERIOD + 1
