# SPDX-License-Identifier: Apache-2.0
"""Ranks that run out of data contribute nothing until all have."""

import numpy as np
import pytest
from mpi4py import MPI

import farandole as fd

NOBODY = np.ones(3, np.longdouble)  # nothing that anybody can send


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("turn", range(20))
def test_what_was_refused_before_a_join_fails_on_all(turn, busy):
    """The last rank is in join() before the others begin. `busy`: it has made a call of that name,
    which is under way."""
    last, name = fd.size() - 1, f"refused {turn} {busy}"
    one, handle = np.full(3, fd.rank() + 1.0), None
    if fd.rank() == last:
        if busy:
            handle = fd.allreduce_async(one, op=fd.Sum, name=name)
        for _ in range(2):
            with pytest.raises(TypeError, match="float128"):
                fd.allreduce(NOBODY, name=name)
        MPI.COMM_WORLD.Barrier()
    else:
        MPI.COMM_WORLD.Barrier()
        if busy:
            handle = fd.allreduce_async(one, op=fd.Sum, name=name)
            handle.wait()
        for _ in range(2):
            with pytest.raises(TypeError, match=f"rank {last}.*float128"):
                fd.allreduce(np.ones(3), name=name)
        if not busy:
            rest = fd.allreduce(one, op=fd.Sum, name=name)
            assert rest.tolist() == [last * (last + 1) / 2] * 3
    assert 0 <= fd.join() < fd.size()
    if busy:
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
