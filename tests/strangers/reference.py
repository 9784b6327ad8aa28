# SPDX-License-Identifier: Apache-2.0
"""What every rank of a program must get, by NumPy in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.arrays import reduced, rows_of
from strangers.plan import Call
from strangers.program import Array, op_of, rows_sent, values

__all__ = ["difference", "expected"]

_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


def expected(call: Call, rank: int) -> list[Array]:
    """The results of a rank that takes part; alltoall gives the received rows too."""
    return [one for index in range(call.tensor.count) for one in _expected(call, index, rank)]


def _expected(call: Call, index: int, rank: int) -> list[Array]:
    t, members = call.tensor, list(call.members)
    inputs = {r: values(t, index, r, members, call.salt) for r in call.active}
    place = members.index(rank)
    if t.op == "broadcast":
        return [inputs[call.active[t.root % len(call.active)]]]
    if t.op == "allgather":
        return [np.concatenate([inputs[r] for r in call.active])]
    if t.op == "alltoall":
        return _received(call, inputs, members, place)
    total = _reduced(call, list(inputs.values()))
    if t.op == "reducescatter":
        total = total[rows_of(place, len(total), len(members))]
    return [total]


def _reduced(call: Call, inputs: Sequence[Array]) -> Array:
    op = op_of(call.tensor)
    if op != "Average" or len(inputs) == len(call.members):
        return reduced(op, list(inputs))
    nothing = [np.zeros_like(inputs[0])] * (len(call.members) - len(inputs))
    return reduced(op, [*inputs, *nothing])  # those who have joined count


def _received(call: Call, inputs: dict[int, Array], members: list[int], place: int) -> list[Array]:
    parts, rows = [], []
    for r in members:
        count = 0
        if r in inputs:
            sent = rows_sent(r, members, call.salt)
            start, count = sum(sent[:place]), sent[place]
            parts.append(inputs[r][start : start + count])
        rows.append(count)
    return [np.concatenate(parts), np.array(rows, np.int64)]


def difference(call: Call, rank: int, got: Sequence[tuple[str, Array]]) -> str:
    """What is wrong with a rank's results, which come with their dtypes; empty: nothing."""
    wanted = expected(call, rank)
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for number, ((dtype, array), right) in enumerate(zip(got, wanted, strict=True)):
        rows = call.tensor.op == "alltoall" and number % 2
        if not rows and dtype != call.tensor.dtype:
            return f"dtype {dtype} instead of {call.tensor.dtype}"
        if text := _compare(array, right, 0.0 if rows else _tolerance(call, right)):
            return f"result {number}: {text}"
    return ""


def _tolerance(call: Call, right: Array) -> float:
    t = call.tensor
    if t.op not in ("allreduce", "reducescatter") or right.dtype.kind not in "fc":
        return 0.0
    if op_of(t) == "Average" or t.dtype == "bfloat16":
        return float(_ROUNDING.get(t.dtype, 2 * np.finfo(right.dtype).eps))
    return 0.0


def _compare(array: Array, right: Array, tolerance: float) -> str:
    if array.shape != right.shape:
        return f"shape {array.shape} instead of {right.shape}"
    wide: Any = np.complex128 if right.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        error = np.abs(array.astype(wide) - right.astype(wide))
        wrong = ~(error <= tolerance * np.abs(right.astype(wide)))
    if not wrong.any():
        return ""
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {right.size} elements are wrong, the first at {where}: "
        f"{array[where]!r} instead of {right[where]!r}"
    )
