# SPDX-License-Identifier: Apache-2.0
"""Every collective on arrays of a library, against NumPy on all ranks' data.

A check is over one library and dtype: it submits all shapes and operations, then waits for all, so
that they meet in few buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole as fd
from harness import arrays
from harness.arrays import Array
from harness.gpu_arrays import Arrays

__all__ = ["CHECKS"]

Check = Callable[[Arrays, str], None]


@functools.lru_cache(maxsize=16)
def everyone(shape: tuple[int, ...], dtype: str) -> list[Array]:
    """All ranks' data; as float32 for bfloat16, which holds these values exactly."""
    carrier = "float32" if dtype == "bfloat16" else dtype
    return [arrays.data(rank, shape, carrier) for rank in range(fd.size())]


def _same(library: Arrays, result: Any, expected: Array, exact: bool = True) -> None:
    """NCCL rounds each rank's share of an average to the dtype."""
    name = str(getattr(result, "dtype", ""))
    small = {"bfloat16": 2.0**-7, "torch.bfloat16": 2.0**-7, "float16": 2.0**-10}.get(name)
    arrays.assert_same(library.get(result), expected, exact, small)


def _reductions(dtype: str) -> list[tuple[str, bool]]:
    """(operation, whether its result has no rounding)."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return [(op, arrays.is_exact(kind, op)) for op in arrays.ops_of(kind)]


def allreduce(library: Arrays, dtype: str) -> None:
    calls = []
    for op, exact in _reductions(dtype):
        for shape in arrays.shapes(dtype):
            inputs = everyone(shape, dtype)
            mine = library.put(inputs[fd.rank()], dtype)
            name = f"{dtype}.{op}.{shape}"
            handle = fd.allreduce_async(mine, op=getattr(fd, op), name=name)
            calls.append((handle, mine, inputs, arrays.reduced(op, inputs), exact))
    for handle, mine, inputs, expected, exact in calls:
        _same(library, handle.wait(), expected, exact)
        _same(library, mine, inputs[fd.rank()])


def allreduce_in_place(library: Arrays, dtype: str) -> None:
    calls = []
    for op, exact in _reductions(dtype):
        for shape in arrays.shapes(dtype):
            inputs = everyone(shape, dtype)
            mine = library.put(inputs[fd.rank()], dtype)
            handle = fd.allreduce_async_(mine, op=getattr(fd, op))
            calls.append((handle, mine, arrays.reduced(op, inputs), exact))
    for handle, mine, expected, exact in calls:
        assert handle.wait() is mine
        _same(library, mine, expected, exact)


def scaled(library: Arrays, dtype: str) -> None:
    """prescale and postscale, of the dtypes that have fractions."""
    if dtype not in ("bfloat16", *arrays.FLOATS):
        return
    inputs = everyone((1000,), dtype)
    mine = library.put(inputs[fd.rank()], dtype)
    result = fd.allreduce(mine, op=fd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    _same(library, result, np.asarray(2 * arrays.reduced("Sum", inputs), inputs[0].dtype))


def grouped_allreduce(library: Arrays, dtype: str) -> None:
    op, exact = _reductions(dtype)[-1]
    inputs = [everyone(shape, dtype) for shape in arrays.shapes(dtype)]
    mine = [library.put(one[fd.rank()], dtype) for one in inputs]
    results = fd.grouped_allreduce(mine, op=getattr(fd, op), name=f"group.{dtype}")
    for result, one in zip(results, inputs, strict=True):
        _same(library, result, arrays.reduced(op, one), exact)


def broadcast(library: Arrays, dtype: str) -> None:
    calls = []
    for root in range(fd.size()):
        for shape in arrays.shapes(dtype):
            inputs = everyone(shape, dtype)
            mine = library.put(inputs[fd.rank()], dtype)
            copy = library.put(inputs[fd.rank()], dtype)
            calls.append((fd.broadcast_async(mine, root), inputs[root]))
            calls.append((fd.broadcast_async_(copy, root), inputs[root]))
    for handle, expected in calls:
        _same(library, handle.wait(), expected)


def allgather(library: Arrays, dtype: str) -> None:
    """Equal and uneven rows, none on some ranks, more than a megabyte."""
    rows: list[Callable[[int], int]]
    rows = [lambda r: 3, lambda r: r, lambda r: 1000 * (r % 2), lambda r: 300_000 + r]
    calls = []
    for count in rows:
        for rest in ((),) if count is rows[-1] else ((), (2, 3), (0,)):
            inputs = [everyone((count(r), *rest), dtype)[r] for r in range(fd.size())]
            mine = library.put(inputs[fd.rank()], dtype)
            calls.append((fd.allgather_async(mine), np.concatenate(inputs)))
    for handle, expected in calls:
        _same(library, handle.wait(), expected)


def reducescatter(library: Arrays, dtype: str) -> None:
    calls = []
    for op, exact in _reductions(dtype):
        if op not in ("Sum", "Average"):
            continue
        for shape in ((0,), (1, 5), (7,), (1000, 5)):
            inputs = everyone(shape, dtype)
            mine = library.put(inputs[fd.rank()], dtype)
            rows = arrays.rows_of(fd.rank(), shape[0], fd.size())
            handle = fd.reducescatter_async(mine, op=getattr(fd, op))
            calls.append((handle, arrays.reduced(op, inputs)[rows], exact))
    for handle, expected, exact in calls:
        _same(library, handle.wait(), expected, exact)


def alltoall(library: Arrays, dtype: str) -> None:
    """Equal parts, and uneven ones of which some are empty."""
    me, size = fd.rank(), fd.size()
    equal = everyone((4 * size, 2), dtype)
    parts = [one[4 * me : 4 * me + 4] for one in equal]
    result, received = fd.alltoall_async(library.put(equal[me], dtype)).wait()
    assert received.tolist() == [4] * size
    _same(library, result, np.concatenate(parts))

    splits = [[(r + i) % 3 for i in range(size)] for r in range(size)]
    inputs = [everyone((sum(splits[r]), 3), dtype)[r] for r in range(size)]
    ends = np.cumsum(splits, axis=1)
    parts = [inputs[r][ends[r][me] - splits[r][me] : ends[r][me]] for r in range(size)]
    result, received = fd.alltoall_async(library.put(inputs[me], dtype), splits[me]).wait()
    assert received.tolist() == [splits[r][me] for r in range(size)]
    _same(library, result, np.concatenate(parts))


CHECKS: list[Check] = [
    allreduce,
    allreduce_in_place,
    scaled,
    grouped_allreduce,
    broadcast,
    allgather,
    reducescatter,
    alltoall,
]
