# SPDX-License-Identifier: Apache-2.0
"""`farandole check` compares every collective, dtype and op with NumPy's result.

Each rank computes the inputs of all ranks, so that it knows which data it must receive.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import farandole as fd
from farandole.errors import counted
from farandole.output import rank_zero_printer, seconds

EXAMPLES = """\
examples:
  mpirun -np 2 --bind-to none farandole check                       # this machine
  mpirun -np 8 -H node1:4,node2:4 --bind-to none farandole check    # a cluster

Exit code 1: a result is wrong. Exit code 2: a call failed.
"""

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128", "bool"]
_UFUNCS = {"Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}
_OPS = {"b": ["Min", "Max", "Product", ""], "c": ["Sum", "Average", ""]}  # key: kind of dtype
_COUNTS = (7, 10_007, 200_003)  # numbers of elements: a small array, one block, many blocks
_PERIOD = 1009  # values repeat after so many elements; a prime, so that a shift by a block shows


def _periods(dtype: str, op: str, size: int) -> Array:
    """Returns one row of values per rank. Values differ by rank and index.

    At each index, only 25 ranks (3 for Min, Max and Product) have a value other than the op's
    neutral value. Therefore no sum or product overflows int8, and no extreme value is the same at
    every index.
    """
    kind, random = np.dtype(dtype).kind, np.random.default_rng(57)
    low = 2 if op == "Product" else 0 if kind in "ub" else -4
    values: Array = random.integers(low, 5, (size, _PERIOD))
    if kind == "c":
        values = values + 1j * random.integers(-4, 5, values.shape)
    neutral = {"Product": 1, "Min": 5, "Max": low}
    place = np.arange(size)[:, None] - np.arange(_PERIOD)
    values[place % size >= (3 if op in neutral else 25)] = neutral.get(op, 0)
    return (values % 2 if kind == "b" else values).astype(dtype)


# A collective's name, the function that starts it, the arguments, and the expected result.
_Case = tuple[str, Callable[..., Any], tuple[Any, ...], Array]


def _reductions(op: str, every: Array, count: int) -> Iterator[_Case]:
    """Yields cases of collectives that have an op, on `count` elements of each rank."""
    if op != "Average":
        one = _UFUNCS[op].reduce(every, axis=0, dtype=every.dtype)
    else:  # integer averages are truncated
        one = every.sum(axis=0) / len(every)
        one = (one if every.dtype.kind in "fc" else np.trunc(one)).astype(every.dtype)
    rank, right = fd.rank(), np.resize(one, count)
    mine = np.resize(every[rank], count)
    yield "allreduce", fd.allreduce_async, (mine,), right
    yield "allreduce_", fd.allreduce_async_, (mine,), right
    yield "reducescatter", fd.reducescatter_async, (mine,), np.array_split(right, len(every))[rank]


def _moves(_: str, every: Array, count: int) -> Iterator[_Case]:
    """Yields cases of collectives without an op, on about `count` elements in uneven parts."""
    rank, size = fd.rank(), len(every)
    root, part = count % size, max(1, count // size)
    splits = np.add.outer(np.arange(size), np.arange(size)) % 3 * part  # sender, receiver
    whole = [np.resize(row, total) for row, total in zip(every, splits.sum(axis=1), strict=True)]
    first = [row[:n] for row, n in zip(whole, splits[:, 0], strict=True)]
    ends = splits.cumsum(axis=1)[:, rank]
    mine = [row[end - n : end] for row, end, n in zip(whole, ends, splits[:, rank], strict=True)]
    yield "allgather", fd.allgather_async, (first[rank],), np.concatenate(first)
    yield "alltoall", fd.alltoall_async, (whole[rank], splits[rank]), np.concatenate(mine)
    given = np.resize(every[rank], whole[root].size)
    yield "broadcast", fd.broadcast_async, (given, root), whole[root]


def _wrong(op: str, got: Array, right: Array) -> str:
    """Returns a description of a wrong result, or "" if the result is right."""
    if (got.dtype, got.shape) != (right.dtype, right.shape):
        return f"{got.dtype} {got.shape} instead of {right.dtype} {right.shape}"
    differs = got != right
    if op == "Average" and right.dtype.kind in "fc":  # the only op that rounds
        differs = ~(abs(got - right) <= 2 * np.finfo(right.dtype).eps * (1 + abs(right)))
    places = np.flatnonzero(differs)
    if not places.size:
        return ""
    x, y = got[places[0]], right[places[0]]
    return f"{places.size} of {right.size} elements, [{places[0]}] is {x} instead of {y}"


def compared(
    dtype: str,
    timeout: float,
    where: str = "CPU",
    put: Callable[[Array], Any] = np.array,
    get: Callable[[Any], Array] = np.asarray,
) -> Iterator[tuple[str, str, str]]:
    """Yields, for each call, the collective, the op, and the fault on this rank or "".

    This is a collective. `put` copies an array to the memory called `where`, and `get` copies it
    back.
    """
    for op in _OPS.get(np.dtype(dtype).kind, [*_UFUNCS, "Average", ""]):
        every, more = _periods(dtype, op, fd.size()), {"op": getattr(fd, op)} if op else {}
        for count in _COUNTS:
            started = []
            for what, start, (array, *rest), right in (_reductions if op else _moves)(
                op, every, count
            ):
                name = f"check.{where}.{what}.{op}.{dtype}.{count}"
                call = start(put(array), *rest, name=name, timeout=timeout, **more)
                started.append((what, call, right))
            for what, call, right in started:
                result = call.wait()
                text = _wrong(op, get(result[0] if what == "alltoall" else result), right)
                yield what, op, text and f"{dtype}: {text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds for each call (60)")


def run(options: argparse.Namespace) -> int:
    """Compare every collective, dtype and op with NumPy's result; fail if one is wrong."""
    fd.init()
    calls: dict[tuple[str, str], list[str]] = {}
    for dtype in DTYPES:
        for what, op, text in compared(dtype, options.timeout):
            calls.setdefault((what, op), []).append(text and f"rank {fd.rank()}: {text}")
    rank, world = fd.rank(), (counted(fd.size(), "rank"), counted(fd.cross_size(), "host"))
    everyone = fd.allgather_object(calls, name="check.calls")
    fd.shutdown()
    tell, faults = rank_zero_printer(rank), 0
    tell(f"{'collective':14} {'op':8} calls  result")
    for (what, op), own in calls.items():
        wrong = [text for theirs in everyone for text in theirs[what, op] if text]
        faults += len(wrong)
        tell(f"{what:14} {op:8} {len(own):5}  {'; '.join(wrong[:3]) or 'right'}")
    tell(f"{counted(faults, 'wrong result')} on {' of '.join(world)}")
    return int(faults > 0)
