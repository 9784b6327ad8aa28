# SPDX-License-Identifier: Apache-2.0
"""The cases of `farandole bench`: collectives, their inputs, and their expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Values repeat after so many elements. The number is a prime, so that a shift of the data by a
# block, stripe or page is noticed. It is small, so that sums over ranks are exact in every dtype.
_PERIOD = 13
_CHUNK = _PERIOD << 13  # number of elements that are compared at once

DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Collective:
    """A collective. As in nccl-tests, its size is that of a rank's largest buffer."""

    name: str
    # Returns bus bandwidth divided by algorithm bandwidth, for a number of ranks.
    bus: Callable[[int], float]
    split: bool = False  # True if the buffer consists of equal parts, one per rank


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
    """A collective on `count` elements, on rank `rank` of `size`."""

    collective: Collective
    dtype: str
    count: int
    rank: int
    size: int

    @classmethod
    def of(cls, name: str, dtype: str, nbytes: int, rank: int, size: int) -> Case:
        """Returns the case closest to `nbytes`.

        The case has at least one element. If the collective is split, it has equal parts.
        """
        collective = COLLECTIVES[name]
        parts = size if collective.split else 1
        count = max(1, nbytes // np.dtype(dtype).itemsize // parts) * parts
        return cls(collective, dtype, count, rank, size)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a rank's largest buffer."""
        return self.count * np.dtype(self.dtype).itemsize

    @property
    def output_count(self) -> int:
        """Number of elements in a rank's result."""
        scatters = self.collective.name == "reducescatter"
        return self.count // self.size if scatters else self.count


class Operand:
    """A rank's input, which holds small integers that depend on rank and index."""

    def __init__(self, case: Case) -> None:
        """Allocates the array. fill() writes the values."""
        self.case = case
        gathers = case.collective.name == "allgather"
        count = case.count // case.size if gathers else case.count
        self.array: Array = np.empty(count, case.dtype)

    def fill(self) -> None:
        """Writes this rank's values."""
        chunk = np.resize(_values(self.case.rank), _CHUNK).astype(self.array.dtype)
        for start in range(0, self.array.size, _CHUNK):
            part = self.array[start : start + _CHUNK]
            part[:] = chunk[: part.size]

    def wrong(self, output: Array) -> int:
        """Returns the number of wrong elements in the result of the first call after fill()."""
        blocks = self._expected()
        if output.size != self.case.output_count:
            return max(output.size, 1)
        parts = zip(np.split(output, len(blocks)), blocks, strict=True)
        return sum(self._differ(part, block) for part, block in parts)

    def _expected(self) -> list[Array]:
        """Returns the first _PERIOD values of each of the equal-sized blocks of a right result."""
        case, name = self.case, self.case.collective.name
        ranks = range(case.size)
        mine = case.rank * (case.count // case.size)  # start of this rank's part
        if name == "broadcast":
            return [_values(0)]
        if name == "allgather":
            return [_values(r) for r in ranks]
        if name == "alltoall":
            return [_values(r, mine) for r in ranks]
        return [np.sum([_values(r, mine * case.collective.split) for r in ranks], axis=0)]

    def _differ(self, got: Array, period: Array) -> int:
        wanted = np.resize(period, _CHUNK).astype(got.dtype)
        starts = range(0, got.size, _CHUNK)
        parts = (got[start : start + _CHUNK] for start in starts)
        return sum(int(np.count_nonzero(part != wanted[: part.size])) for part in parts)


def _values(rank: int, start: int = 0) -> Array:
    return (np.arange(start, start + _PERIOD) + 5 * rank) % _PERIOD + 1
