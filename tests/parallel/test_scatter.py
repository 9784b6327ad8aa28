# SPDX-License-Identifier: Apache-2.0
"""scatter: the root's rows, even and uneven, by every door, and what is wrong with a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from harness.arrays import DTYPES, Array, assert_same, data
from harness.ranks import last

SOON = 10.0  # seconds: a stall takes longer, everything else is a matter of milliseconds


def part_of(whole: Array, splits: list[int], place: int) -> Array:
    start = sum(splits[:place])
    return whole[start : start + splits[place]]


def brought(whole: Array, root: int) -> Array:
    """The root's array, and on other ranks one without rows that is like it."""
    return whole if fd.rank() == root else np.empty((0, *whole.shape[1:]), whole.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven(dtype: str) -> None:
    rests: list[tuple[int, ...]] = [(), (5,), (2, 0)]
    cases = [*product([0, 1, 700], rests), (70_000, rests[0])]  # several blocks
    for (scale, rest), root in product(cases, range(fd.size())):
        splits = [scale * ((r + 1) % 3) for r in range(fd.size())]
        whole = data(root, (sum(splits) + 2, *rest), dtype, salt=root)  # 2 rows stay
        result = fd.scatter(brought(whole, root), root, splits if fd.rank() == root else None)
        assert_same(result, part_of(whole, splits, fd.rank()))
        assert_same(whole, data(root, whole.shape, dtype, salt=root))


def test_many_in_flight() -> None:
    """Named and unnamed, waited for in another order than they were made in."""
    n = fd.size()
    splits = [np.random.default_rng(i).integers(0, 50, n).tolist() for i in range(30)]
    wholes = [data(i, (sum(splits[i]), 2), "float64") for i in range(30)]
    handles = []
    for i, whole in enumerate(wholes):
        name = f"deal {i}" if i % 2 else None
        handles.append(fd.scatter_async(brought(whole, i % n), i % n, splits[i], name=name))
    for i in reversed(range(30)):
        assert_same(handles[i].wait(), part_of(wholes[i], splits[i], fd.rank()))


def test_splits_of_every_kind() -> None:
    n = fd.size()
    rows = [r + 1 for r in range(n)]
    whole = data(0, (sum(rows), 3), "int32")
    for splits in (rows, tuple(rows), np.array(rows), torch.tensor(rows)):
        assert_same(fd.scatter(brought(whole, 0), 0, splits), part_of(whole, rows, fd.rank()))


@pytest.mark.ranks(4)
def test_in_a_process_set() -> None:
    process_set = fd.add_process_set([1, 3])
    if process_set.included():
        whole = data(3, (5, 2), "float32")
        mine = brought(whole, 3)
        result = fd.scatter(mine, 3, [4, 1], process_set=process_set)
        assert_same(result, whole[:4] if fd.rank() == 1 else whole[4:])
        for wrong in (0, 7):
            with pytest.raises(ValueError, match=rf"root rank {wrong} is not among ranks 1, 3"):
                fd.scatter(mine, wrong, name="outside", process_set=process_set)
    fd.barrier()
    assert fd.remove_process_set(process_set)


# ---- what is wrong on one rank is an error on all


def whole_of(*shape: int, dtype: str = "float32") -> Array:
    return data(fd.rank(), shape, dtype)


# By the wrong rank, the others calling rightly.
WRONG: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "rows": (
        lambda: fd.scatter(whole_of(3 * fd.size() + 1, 2), last(), name="x"),
        ValueError,
        "must be a multiple",
    ),
    "splits too long": (
        lambda: fd.scatter(whole_of(3, 2), last(), [1] * (fd.size() + 1), name="x"),
        ValueError,
        "entries for",
    ),
    "splits too many rows": (
        lambda: fd.scatter(whole_of(3, 2), last(), [4] * fd.size(), name="x"),
        ValueError,
        "do not fit 3 rows",
    ),
    "scalar": (lambda: fd.scatter(whole_of(), last(), name="x"), ValueError, "scalar"),
    "root": (lambda: fd.scatter(whole_of(4, 2), 99, name="x"), ValueError, "root rank 99"),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", WRONG)
def test_refused_by_one_rank(case: str) -> None:
    call, error, says = WRONG[case]
    start = time.monotonic()
    if fd.rank() == last():
        with pytest.raises(error, match=says):
            call()
    else:
        with pytest.raises(error, match=f"rank {last()}.*{says}"):
            fd.scatter(np.empty((0, 2), "float32"), last(), name="x")
    assert time.monotonic() - start < SOON
    assert fd.scatter(np.full(fd.size(), fd.rank()), last(), name="x").tolist() == [last()]


# What the last rank, which is the root, says otherwise than its peers.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: fd.scatter(whole_of(4, 2, dtype="float64"), last(), name="x"), "dtype is"),
    "trailing": (lambda: fd.scatter(whole_of(4, 3), last(), name="x"), r"shape is \(\*, 2\)"),
    "dimensions": (lambda: fd.scatter(whole_of(4), last(), name="x"), "shape is"),
    "root": (lambda: fd.scatter(whole_of(4, 2), 0, name="x"), "root rank is"),
    "operation": (lambda: fd.broadcast(whole_of(4, 2), last(), name="x"), "operation is"),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", DIFFERENT)
def test_mismatch(case: str) -> None:
    call, says = DIFFERENT[case]
    mine = call if fd.rank() == last() else lambda: fd.scatter(whole_of(4, 2), last(), name="x")
    with pytest.raises(fd.MismatchError, match=f"'x'.*{says}"):
        mine()


@pytest.mark.ranks(2, 4)
def test_ranks_that_have_joined() -> None:
    """A receiver that has joined does no harm; a root that has joined fails the call on all."""
    if fd.rank() != last():
        rows = np.arange(2.0 * fd.size()) if fd.rank() == 0 else np.empty(0)
        got = fd.scatter(rows, 0, name="to the joined")
        assert got.tolist() == [2.0 * fd.rank(), 2.0 * fd.rank() + 1]
        with pytest.raises(ValueError, match=f"root rank {last()} brings no tensor"):
            fd.scatter(np.empty(0), last(), name="of the joined")
    fd.join()
