# SPDX-License-Identifier: Apache-2.0
"""scatter: splits of every kind, in a process set, and calls that only a scatter can get wrong.

Dtypes and roots are in harness/collectives.py, random splits in test_uneven.py, differences between
ranks in test_errors.py, wrong arguments in test_arguments.py, joined ranks in test_join_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
from harness.arrays import Array, assert_same, data
from harness.ranks import last


def brought(whole: Array, root: int) -> Array:
    """The root's array, and on other ranks one without rows that is like it."""
    return whole if fd.rank() == root else np.empty((0, *whole.shape[1:]), whole.dtype)


def test_splits_of_every_kind() -> None:
    rows = [r + 1 for r in range(fd.size())]
    whole = data(0, (sum(rows), 3), "int32")
    start = sum(rows[: fd.rank()])
    for splits in (rows, tuple(rows), np.array(rows), torch.tensor(rows)):
        mine = whole[start : start + rows[fd.rank()]]
        assert_same(fd.scatter(brought(whole, 0), 0, splits), mine)


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


# By the last rank, which is the root, the others calling rightly: the call, and what all read.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (lambda: fd.scatter(whole_of(3 * fd.size() + 1), last(), name="x"), "a multiple"),
    "splits": (lambda: fd.scatter(whole_of(3), last(), [1] * 9, name="x"), "entries for"),
    "sum": (lambda: fd.scatter(whole_of(3), last(), [4] * fd.size(), name="x"), "do not fit 3 row"),
    "scalar": (lambda: fd.scatter(np.ones((), "float32"), last(), name="x"), "scalar"),
    "root": (lambda: fd.scatter(whole_of(4), 99, name="x"), "root rank 99"),
}


def whole_of(rows: int) -> Array:
    return data(fd.rank(), (rows, 2), "float32")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", WRONG)
def test_refused_by_one_rank(case: str) -> None:
    call, says = WRONG[case]
    if fd.rank() == last():
        with pytest.raises(ValueError, match=says):
            call()
    else:
        with pytest.raises(ValueError, match=f"rank {last()}.*{says}"):
            fd.scatter(np.empty((0, 2), "float32"), last(), name="x")
    assert fd.scatter(np.full(fd.size(), fd.rank()), last(), name="x").tolist() == [last()]
