# SPDX-License-Identifier: Apache-2.0
"""Any splits and any numbers of rows, none included: what NumPy makes of all ranks' data."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import farandole as fd
from harness.arrays import Array, assert_same, data, reduced, rows_of

fd.init()  # the strategies below depend on the number of ranks
SIZE, RANK = fd.size(), fd.rank()

# The profile draws the same examples on every rank, and says how many (tests/conftest.py).
DTYPES = st.sampled_from(["uint8", "int64", "float16", "float32", "float64"])
WIDTHS = st.lists(st.integers(0, 4), max_size=2).map(tuple)
COUNTS = st.lists(st.one_of(st.integers(0, 6), st.just(700)), min_size=SIZE, max_size=SIZE)
TABLES = st.lists(COUNTS, min_size=SIZE, max_size=SIZE)
NAMES = st.sampled_from([None, "named"])


def inputs(counts: list[int], width: tuple[int, ...], dtype: str) -> list[Array]:
    """Each rank's (counts[rank], *width)."""
    return [data(rank, (n, *width), dtype) for rank, n in enumerate(counts)]


@given(table=TABLES, spare=COUNTS, width=WIDTHS, dtype=DTYPES, name=NAMES)
def test_alltoall(table: Any, spare: Any, width: Any, dtype: str, name: str | None) -> None:
    """table[i][j] rows go from i to j; `spare` rows at the end of each input go nowhere."""
    given_rows = [sum(row) + extra for row, extra in zip(table, spare, strict=True)]
    xs = inputs(given_rows, width, dtype)
    output, received = fd.alltoall(xs[RANK], table[RANK], name=name)
    starts = [sum(row[:RANK]) for row in table]
    pieces = [xs[i][starts[i] : starts[i] + table[i][RANK]] for i in range(SIZE)]
    assert received.tolist() == [row[RANK] for row in table]
    assert_same(output, np.concatenate(pieces))


@given(counts=COUNTS, width=WIDTHS, dtype=DTYPES, name=NAMES)
def test_allgather(counts: Any, width: Any, dtype: str, name: str | None) -> None:
    xs = inputs(counts, width, dtype)
    assert_same(fd.allgather(xs[RANK], name=name), np.concatenate(xs))


@given(tables=st.lists(COUNTS, min_size=1, max_size=3), width=WIDTHS, name=NAMES)
def test_grouped_allgather(tables: Any, width: Any, name: str | None) -> None:
    columns = [inputs(counts, width, "float32") for counts in tables]
    results = fd.grouped_allgather([xs[RANK] for xs in columns], name=name)
    for result, xs in zip(results, columns, strict=True):
        assert_same(result, np.concatenate(xs))


@given(
    rows=st.one_of(st.integers(0, 9), st.just(1001)),
    width=WIDTHS,
    dtype=DTYPES,
    op=st.sampled_from(["Sum", "Average", "Min"]),
    name=NAMES,
)
def test_reducescatter(rows: int, width: Any, dtype: str, op: str, name: str | None) -> None:
    xs = inputs([rows] * SIZE, width, dtype)
    result = fd.reducescatter(xs[RANK], op=getattr(fd, op), name=name)
    exact = op != "Average" or not dtype.startswith("float")
    assert_same(result, reduced(op, xs)[rows_of(RANK, rows, SIZE)], exact)
