# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of data contribute nothing until all have."""

import numpy as np
import pytest

import farandole as fd


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("op", ["Sum", "Min", "Max", "Product"])
def test_joined_ranks_change_no_reduction(op, named):
    reduce = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
    for turn in range(fd.rank() + 1):  # rank r makes r + 1 calls
        active = [r + 2.0 for r in range(turn, fd.size())]
        result = fd.allreduce(
            np.full(1000, fd.rank() + 2.0),
            op=getattr(fd, op),
            name=f"turn {turn} of {op}" if named else None,
        )
        assert result.tolist() == [reduce(active)] * 1000
    assert fd.join() == fd.size() - 1
    assert fd.allreduce(np.ones(2), op=fd.Sum).tolist() == [fd.size()] * 2


def test_gathering_while_some_have_joined():
    for turn in range(fd.rank() + 1):
        rows = fd.allgather(np.full((2, 3), fd.rank()), name=f"rows {turn}")
        assert rows[::2, 0].tolist() == list(range(turn, fd.size()))
        copy = fd.broadcast(np.full(2, fd.rank()), fd.size() - 1, name=f"copy {turn}")
        assert copy.tolist() == [fd.size() - 1] * 2
    assert fd.join() == fd.size() - 1


def test_everybody_joins_at_once():
    for _ in range(5):
        assert 0 <= fd.join() < fd.size()
        assert fd.allreduce(np.ones(1), op=fd.Sum) == fd.size()
