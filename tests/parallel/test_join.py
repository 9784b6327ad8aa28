# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of data contribute nothing until all have."""

import numpy as np
import pytest
from mpi4py import MPI

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


NOBODY = np.ones(3, np.longdouble)  # nothing that anybody can send


@pytest.mark.parametrize("turn", range(20))
def test_what_was_refused_before_a_join_fails_on_all(turn):
    # The last rank is in join() before the others begin: it takes part in no call but those two.
    last, name = fd.size() - 1, f"refused {turn}"
    if fd.rank() == last:
        for _ in range(2):
            with pytest.raises(TypeError, match="float128"):
                fd.allreduce(NOBODY, name=name)
        MPI.COMM_WORLD.Barrier()
    else:
        MPI.COMM_WORLD.Barrier()
        for _ in range(2):
            with pytest.raises(TypeError, match=f"rank {last}.*float128"):
                fd.allreduce(np.ones(3), name=name)
        one = fd.allreduce(np.full(3, fd.rank()), op=fd.Sum, name=name)
        assert one.tolist() == [last * (last - 1) / 2] * 3
    assert 0 <= fd.join() < fd.size()


@pytest.mark.parametrize("turn", range(20))
def test_what_was_refused_during_a_call_before_a_join_fails_on_all(turn):
    last, name = fd.size() - 1, f"busy {turn}"
    one = np.full(3, fd.rank() + 1.0)
    handle = None
    if fd.rank() == last:
        handle = fd.allreduce_async(one, op=fd.Sum, name=name)
        for _ in range(2):
            with pytest.raises(TypeError, match="float128"):
                fd.allreduce(NOBODY, name=name)
    MPI.COMM_WORLD.Barrier()
    if fd.rank() != last:
        handle = fd.allreduce_async(one, op=fd.Sum, name=name)
        handle.wait()
        for _ in range(2):
            with pytest.raises(TypeError, match=f"rank {last}.*float128"):
                fd.allreduce(np.ones(3), name=name)
    assert 0 <= fd.join() < fd.size()
    assert handle.wait().tolist() == [fd.size() * (fd.size() + 1) / 2] * 3


def test_a_call_after_a_refused_one_counts_though_its_rank_joins():
    last = fd.size() - 1
    if fd.rank() == last:
        with pytest.raises(TypeError, match="float128"):
            fd.allreduce(NOBODY, name="both")
        handle = fd.allreduce_async(np.full(3, 7.0), op=fd.Sum, name="both")
        MPI.COMM_WORLD.Barrier()
    else:
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(TypeError, match="float128"):
            fd.allreduce(np.ones(3), name="both")
        handle = fd.allreduce_async(np.full(3, 1.0), op=fd.Sum, name="both")
    assert 0 <= fd.join() < fd.size()
    assert handle.wait().tolist() == [7.0 + last] * 3
