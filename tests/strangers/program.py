# SPDX-License-Identifier: Apache-2.0
"""A program of calls: the tensors that it uses, and its moves. Any list of moves is a program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.arrays import COMPLEX, data, has_op

__all__ = [
    "FATES",
    "MOST_RANKS",
    "OPERATIONS",
    "Program",
    "Tensor",
    "itemsize",
    "op_of",
    "rows_sent",
    "shape_of",
    "values",
]

Array = np.ndarray[Any, np.dtype[Any]]

MOST_RANKS = 4  # lists by rank have so many items, so that a program means something at any size
OPERATIONS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
IN_PLACE = ("allreduce", "broadcast")

# What becomes of a rank's call. Each is a thing that a user's code does, by plan or by accident.
FATES = (
    "wait",
    "blocking",  # the form without a handle
    "later",  # waits before the name comes again, or at `settle`
    "poll",
    "drop",  # the handle; the arrays stay
    "forget",  # the handle and the arrays
    "raise",  # an exception of the user's between submission and wait
    "timeout_again",
    "timeout_drop",
    "blocking_timeout",  # whose handle nobody has when it raises
    "data",  # torch: .data is replaced in flight
    "free",  # the arrays are deleted in flight, the handle is waited for
)


@dataclass(frozen=True)
class Tensor:
    """What one call is about; a program calls each of its tensors as often as its moves say."""

    op: str = "allreduce"
    named: bool = True
    group: int = 0  # 0: all ranks; i: the i-th of the program's sets
    dtype: str = "float32"
    shape: tuple[int, ...] = (7,)
    reduce: str = "Sum"
    in_place: bool = False
    count: int = 1  # of arrays; more than one: a grouped call
    root: int = 0  # which of those who take part
    kinds: tuple[str, ...] = ("numpy",) * MOST_RANKS  # by rank: numpy, torch, hvd
    memory: str = "own"  # arena: mapped by all ranks; strided: not contiguous
    keep: bool = False  # the same arrays each time, as long as nothing is in flight


@dataclass(frozen=True)
class Program:
    """`moves` are lists: a word and its arguments, as in plan.Planner; impossible ones count for
    nothing."""

    tensors: tuple[Tensor, ...]
    moves: tuple[Any, ...]
    sets: tuple[tuple[int, ...], ...] = ()

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps({"calls": asdict(self)})

    @staticmethod
    def read(found: dict[str, Any]) -> Program:
        """From what text() has written."""
        tensors = [{**t, "shape": tuple(t["shape"])} for t in found["tensors"]]
        return Program(tuple(Tensor(**t) for t in tensors), found["moves"], found["sets"])


def shape_of(t: Tensor, index: int, rank: int) -> tuple[int, ...]:
    """Describes array number `index` of a rank; alltoall's rows come from rows_sent."""
    shape = t.shape
    if t.op in ("allgather", "reducescatter", "alltoall"):
        shape = shape or (1,)
    if t.op == "allgather":
        return (shape[0] + rank % 3 + index, *shape[1:])
    return (shape[0] + index, *shape[1:]) if shape else shape


def rows_sent(rank: int, members: list[int], salt: int) -> list[int]:
    """alltoall: how many rows a rank sends to each member."""
    return [(rank + 2 * other + salt) % 4 for other in members]


def op_of(t: Tensor) -> str:
    """The reduction, one that the dtype has."""
    if has_op(_plain(t.dtype), t.reduce):
        return t.reduce
    return "Sum" if t.dtype in COMPLEX else "Max"


def values(t: Tensor, index: int, rank: int, members: list[int], salt: int) -> Array:
    """A rank's input; bfloat16 as float32."""
    shape = shape_of(t, index, rank)
    if t.op == "alltoall":
        shape = (sum(rows_sent(rank, members, salt)), *shape[1:])
    return data(rank, shape, _plain(t.dtype), 10 * salt + index)


def _plain(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def itemsize(dtype: str) -> int:
    """Bytes."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
