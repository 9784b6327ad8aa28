# SPDX-License-Identifier: Apache-2.0
"""Any splits of alltoall, none included: what NumPy makes of all ranks' data."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import farandole as fd
from harness.arrays import assert_same, data

fd.init()  # the strategies below depend on the number of ranks
SIZE, RANK = fd.size(), fd.rank()

# The profile draws the same examples on every rank, and says how many (tests/conftest.py).
DTYPES = st.sampled_from(["uint8", "int64", "float16", "float32", "float64"])
WIDTHS = st.lists(st.integers(0, 4), max_size=2).map(tuple)
COUNTS = st.lists(st.one_of(st.integers(0, 6), st.just(700)), min_size=SIZE, max_size=SIZE)
TABLES = st.lists(COUNTS, min_size=SIZE, max_size=SIZE)
NAMES = st.sampled_from([None, "named"])


@given(table=TABLES, spare=COUNTS, width=WIDTHS, dtype=DTYPES, name=NAMES)
def test_alltoall(table: Any, spare: Any, width: Any, dtype: str, name: str | None) -> None:
    """table[i][j] rows go from i to j; `spare` rows at the end of each input go nowhere."""
    given_rows = [sum(row) + extra for row, extra in zip(table, spare, strict=True)]
    xs = [data(rank, (n, *width), dtype) for rank, n in enumerate(given_rows)]
    output, received = fd.alltoall(xs[RANK], table[RANK], name=name)
    starts = [sum(row[:RANK]) for row in table]
    pieces = [xs[i][starts[i] : starts[i] + table[i][RANK]] for i in range(SIZE)]
    assert received.tolist() == [row[RANK] for row in table]
    assert_same(output, np.concatenate(pieces))
