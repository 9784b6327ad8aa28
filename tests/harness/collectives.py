# SPDX-License-Identifier: Apache-2.0
"""Every collective on arrays of a library, against NumPy on all ranks' data.

A check is over one library and dtype: it submits all shapes and operations, then waits for all, so
that they meet in few buckets; or all are one program of a framework that compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import farandole as fd
from harness import arrays
from harness.arrays import Array
from harness.gpu_arrays import Arrays

__all__ = ["CHECKS", "COMPILED", "NARROW", "Compiled", "everyone", "narrow"]

Check = Callable[[Arrays, str], None]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]  # floats that NumPy lacks


@functools.lru_cache(maxsize=16)
def everyone(shape: tuple[int, ...], dtype: str) -> list[Array]:
    """All ranks' data; as float32 for bfloat16, which holds these values exactly."""
    carrier = "float32" if dtype == "bfloat16" else dtype
    return [arrays.data(rank, shape, carrier) for rank in range(fd.size())]


@dataclass(frozen=True)
class Call:
    """One call, and its right result; `every`: all ranks' arrays, `rest`: further arguments."""

    what: str
    every: list[Array]
    right: Array
    exact: bool = True
    rest: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    received: list[int] = field(default_factory=list)  # alltoall's second result


class Compiled:
    """Arrays of a framework: calls of its adapter as they are, or within one compiled function."""

    def __init__(
        self,
        adapter: Any,
        put: Callable[..., Any],
        kind: type,
        within: Callable[..., Any],
        fixed: bool = False,
    ) -> None:
        """`kind`: the class of results; `fixed`: shapes are the same on all ranks."""
        self.put, self._adapter, self._kind, self._within = put, adapter, kind, within
        self.fixed = fixed

    def get(self, x: Any) -> Array:
        assert isinstance(x, self._kind)
        found = np.asarray(x.numpy() if hasattr(x, "numpy") else x)
        return found.astype(np.float32) if found.dtype.name == "bfloat16" else found

    def run(self, calls: list[Call], mine: list[Any]) -> list[Any]:
        """All results."""

        def program(*xs: Any) -> list[Any]:
            pairs = zip(calls, xs, strict=True)
            return [getattr(self._adapter, c.what)(x, *c.rest, **c.options) for c, x in pairs]

        found: list[Any] = self._within(program)(*mine)
        return found


def _submit(calls: list[Call], mine: list[Any]) -> list[Any]:
    """All results of the core's own calls, which are under way at once."""
    names = [call.what.removesuffix("_") for call in calls]
    ends = ["_async_" if call.what.endswith("_") else "_async" for call in calls]
    handles = [
        getattr(fd, name + end)(x, *call.rest, **call.options)
        for name, end, call, x in zip(names, ends, calls, mine, strict=True)
    ]
    return [handle.wait() for handle in handles]


def _same(library: Arrays, result: Any, expected: Array, exact: bool = True) -> None:
    """NCCL rounds each rank's share of an average to the dtype."""
    name = str(getattr(getattr(result, "dtype", ""), "name", getattr(result, "dtype", "")))
    small = {"bfloat16": 2.0**-7, "torch.bfloat16": 2.0**-7, "float16": 2.0**-10}.get(name)
    arrays.assert_same(library.get(result), expected, exact, small)


def _check(calls_of: Callable[[str, bool], Iterator[Call]]) -> Check:
    """Makes a check of a generator of calls, which takes the dtype and whether shapes are fixed."""

    @functools.wraps(calls_of)
    def check(library: Any, dtype: str) -> None:
        calls = list(calls_of(dtype, getattr(library, "fixed", False)))
        mine = [library.put(call.every[fd.rank()], dtype) for call in calls]
        results = getattr(library, "run", _submit)(calls, mine)
        for call, x, result in zip(calls, mine, results, strict=True):
            if isinstance(result, tuple):
                result, received = result
                assert np.asarray(received).tolist() == call.received
            _same(library, result, call.right, call.exact)
            if call.what.endswith("_"):
                assert result is x
            else:
                _same(library, x, call.every[fd.rank()])

    return check


def _reductions(dtype: str) -> list[tuple[str, bool]]:
    """(operation, whether its result has no rounding)."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return [(op, arrays.is_exact(kind, op)) for op in arrays.ops_of(kind)]


def _allreduces(what: str, dtype: str) -> Iterator[Call]:
    """The longest arrays by two of the operations: no kernel knows how many blocks there are."""
    for number, (op, exact) in enumerate(_reductions(dtype)):
        for shape in arrays.shapes(dtype)[: None if number < 2 else -1]:
            every = everyone(shape, dtype)
            options = {"op": getattr(fd, op), "name": f"{dtype}.{op}.{shape}"}
            yield Call(what, every, arrays.reduced(op, every), exact, (), options)


@_check
def allreduce(dtype: str, _fixed: bool) -> Iterator[Call]:
    yield from _allreduces("allreduce", dtype)


@_check
def allreduce_in_place(dtype: str, _fixed: bool) -> Iterator[Call]:
    yield from _allreduces("allreduce_", dtype)


@_check
def scaled(dtype: str, _fixed: bool) -> Iterator[Call]:
    """prescale and postscale, of the dtypes that have fractions; and of int32, without any."""
    every = everyone((1000,), dtype)
    rows = [("Sum", 2.0, 0.5)] if dtype == "int32" else []
    if dtype in ("bfloat16", *arrays.FLOATS):
        rows = [("Sum", 0.5, 4.0), ("Average", 0.25, 2.0), ("Max", 1.0, 4.0)]
    for op, pre, post in rows:
        right = np.asarray(pre * post * arrays.reduced(op, every), every[0].dtype)
        options = {"op": getattr(fd, op), "prescale_factor": pre, "postscale_factor": post}
        yield Call("allreduce", every, right, op != "Average", (), options)


def grouped_allreduce(library: Arrays, dtype: str) -> None:
    op, exact = _reductions(dtype)[-1]
    inputs = [everyone(shape, dtype) for shape in arrays.shapes(dtype)]
    mine = [library.put(one[fd.rank()], dtype) for one in inputs]
    results = fd.grouped_allreduce(mine, op=getattr(fd, op), name=f"group.{dtype}")
    for result, one in zip(results, inputs, strict=True):
        _same(library, result, arrays.reduced(op, one), exact)


def _broadcasts(what: str, dtype: str) -> Iterator[Call]:
    for root in range(fd.size()):
        for shape in arrays.shapes(dtype):
            every = everyone(shape, dtype)
            yield Call(what, every, every[root], True, (root,))


@_check
def broadcast(dtype: str, _fixed: bool) -> Iterator[Call]:
    yield from _broadcasts("broadcast", dtype)


@_check
def broadcast_in_place(dtype: str, _fixed: bool) -> Iterator[Call]:
    yield from _broadcasts("broadcast_", dtype)


@_check
def allgather(dtype: str, fixed: bool) -> Iterator[Call]:
    """Equal and uneven rows, none on some ranks, more than a megabyte."""
    many = min(300_000, arrays.shapes(dtype)[-1][0])
    rows: list[Callable[[int], int]]
    rows = [lambda r: 3, lambda r: r, lambda r: 1000 * (r % 2), lambda r: many + r]
    for count in rows[:1] if fixed else rows:
        for rest in ((),) if count is rows[-1] else ((), (2, 3), (0,)):
            every = [everyone((count(r), *rest), dtype)[r] for r in range(fd.size())]
            yield Call("allgather", every, np.concatenate(every))


@_check
def reducescatter(dtype: str, _fixed: bool) -> Iterator[Call]:
    for op, exact in _reductions(dtype):
        if op not in ("Sum", "Average"):
            continue
        for shape in ((0,), (1, 5), (7,), (1000, 5)):
            every = everyone(shape, dtype)
            right = arrays.reduced(op, every)[arrays.rows_of(fd.rank(), shape[0], fd.size())]
            yield Call("reducescatter", every, right, exact, (), {"op": getattr(fd, op)})


@_check
def alltoall(dtype: str, fixed: bool) -> Iterator[Call]:
    """Equal parts, and uneven ones of which some are empty."""
    me, size = fd.rank(), fd.size()
    equal = everyone((4 * size, 2), dtype)
    right = np.concatenate([one[4 * me : 4 * me + 4] for one in equal])
    yield Call("alltoall", equal, right, received=[4] * size)
    if fixed:
        return
    splits = [[(r + i) % 3 for i in range(size)] for r in range(size)]
    every = [everyone((sum(splits[r]), 3), dtype)[r] for r in range(size)]
    ends = np.cumsum(splits, axis=1)
    parts = [every[r][ends[r][me] - splits[r][me] : ends[r][me]] for r in range(size)]
    received = [splits[r][me] for r in range(size)]
    yield Call("alltoall", every, np.concatenate(parts), rest=(splits[me],), received=received)


def narrow(library: Compiled, name: str) -> None:
    """Floats that NumPy lacks are summed in float32."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, name)
    every = [np.arange(24, dtype="f4").reshape(4, 6) / 4 + rank for rank in range(fd.size())]
    rounded = [x.astype(dtype) for x in every]
    total = np.sum([x.astype("f4") for x in rounded], axis=0).astype(dtype)
    calls = [
        Call("allreduce", rounded, total, options={"op": fd.Sum}),
        Call("allgather", rounded, np.concatenate(rounded)),
    ]
    mine = [library.put(rounded[fd.rank()], dtype)] * 2
    for call, result in zip(calls, library.run(calls, mine), strict=True):
        assert np.asarray(result).dtype == dtype
        np.testing.assert_array_equal(np.asarray(result), call.right)


COMPILED: list[Check] = [allreduce, scaled, broadcast, allgather, reducescatter, alltoall]
CHECKS: list[Check] = [*COMPILED, allreduce_in_place, broadcast_in_place, grouped_allreduce]
