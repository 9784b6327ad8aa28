# SPDX-License-Identifier: Apache-2.0
"""Every collective x dtype x library by NCCL."""

import numpy as np
import pytest

import farandole as fd
from harness.collectives import CHECKS
from harness.gpu_arrays import CASES, LIBRARIES, Cupy


@pytest.mark.parametrize(("library", "dtype"), CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(check, library, dtype):
    check(LIBRARIES[library](), dtype)


@pytest.mark.ranks(4)
def test_process_sets_have_communicators_of_their_own():
    """Two that overlap in rank 0, and the world, in turn and at once."""
    library, everyone = Cupy(), range(4)
    sets = [fd.add_process_set([0]), fd.add_process_set([0, 3])]
    for turn in range(5):
        handles = []
        for members in (*sets, fd.global_process_set):
            if fd.rank() not in (members.ranks or everyone):
                continue
            x = library.full(70_000 + turn, 1.0 + fd.rank())
            total = sum(1.0 + rank for rank in members.ranks or everyone)
            handles.append((fd.allreduce_async(x, op=fd.Sum, process_set=members), total))
        for handle, total in handles:
            assert np.all(library.get(handle.wait()) == total)
    for members in sets:
        fd.remove_process_set(members)


def test_both_kinds_of_memory_under_way_at_once():
    library, total = Cupy(), sum(range(1, fd.size() + 1))
    for turn in range(10):
        there = fd.allreduce_async(library.full(1000, fd.rank() + 1), op=fd.Sum, name="gpu")
        here = fd.allreduce_async(np.full(1000, fd.rank() + 1.0), op=fd.Sum, name="cpu")
        assert np.all(here.wait() == total), turn
        assert np.all(library.get(there.wait()) == total), turn


@pytest.mark.ranks(2, 4)
def test_memory_kinds_that_differ_are_a_mismatch():
    library = Cupy()
    x = library.full(10, 1.0) if fd.rank() == 0 else np.ones(10, np.float32)
    with pytest.raises(fd.MismatchError, match="differing"):
        fd.allreduce(x, name="differing")


def test_a_group_on_both_kinds_of_memory():
    library, total = Cupy(), sum(range(1, fd.size() + 1))
    pair = [library.full(1000, fd.rank() + 1), np.full(7, fd.rank() + 1.0)]
    there, here = fd.grouped_allreduce(pair, op=fd.Sum, name="mixed")
    assert np.all(library.get(there) == total)
    assert np.all(here == total)
