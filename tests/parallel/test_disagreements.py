# SPDX-License-Identifier: Apache-2.0
"""Groups of which ranks bring more, or less, or nothing, and process sets that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import farandole as fd
from harness.ranks import last

pytestmark = pytest.mark.ranks(2, 3, 4)

# ---- process sets


def in_a_set(call: Callable[[fd.ProcessSet], None]) -> None:
    process_set = fd.add_process_set([0, last()])
    try:
        if process_set.included():
            call(process_set)
    finally:
        fd.barrier(name="the set has done")
        assert fd.remove_process_set(process_set)


@pytest.mark.ranks(3, 4)
def test_a_set_that_stands_for_another() -> None:
    """Its number, its ranks, an equal set that is not registered: the peers wait in the set."""

    def call(process_set: fd.ProcessSet) -> None:
        number = process_set.process_set_id
        ranks = process_set.ranks
        for wrong in (number, ranks, fd.ProcessSet(ranks), tuple(reversed(ranks or []))):
            mine = wrong if fd.rank() == last() else process_set
            for name in ("in the set", None):
                with pytest.raises((TypeError, ValueError), match="process_set is"):
                    fd.allreduce(np.ones(2), name=name, process_set=mine)
                for x in ([np.ones(1)] * 2, [np.ones(1)]):
                    fd.grouped_allreduce(x, name=name, process_set=process_set)

    in_a_set(call)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", ["in no set", None])
@pytest.mark.parametrize("wrong", [object(), 99, fd.ProcessSet([1]), "text"])
def test_a_set_that_is_none(wrong: Any, name: str | None) -> None:
    """Whatever set the peers wait in, they hear of it; in others when they next make that call."""
    told = rf"(rank {last()} refused.*)?process_set is"

    def call(process_set: fd.ProcessSet) -> None:
        mine = wrong if fd.rank() == last() else process_set
        with pytest.raises((TypeError, ValueError), match=told):
            fd.allreduce(np.ones(2), name=name, process_set=mine)
        assert fd.allreduce(np.ones(1), op=fd.Sum, name=name, process_set=process_set) == 2

    in_a_set(call)
    if fd.rank() != last():
        with pytest.raises((TypeError, ValueError), match=told):
            fd.allreduce(np.ones(2), name=name)
    assert fd.allreduce(np.ones(1), op=fd.Sum, name=name) == fd.size()


@pytest.mark.parametrize("wrong", [None, 5, "text", [], [0, 0], [0.5], object()])
def test_adding_what_is_no_set(wrong: Any) -> None:
    for everywhere in (False, True):
        mine = wrong if everywhere or fd.rank() == last() else [0]
        with pytest.raises((TypeError, ValueError), match="process set: "):
            fd.add_process_set(mine)
        with pytest.raises((TypeError, ValueError), match="remove_process_set"):
            fd.remove_process_set(5 if everywhere or fd.rank() == last() else fd.global_process_set)
    process_set = fd.add_process_set([0])
    assert fd.remove_process_set(process_set)


def test_removing_different_sets() -> None:
    process_set = fd.add_process_set([last()])
    other = fd.ProcessSet([0]) if fd.rank() == last() else process_set
    with pytest.raises(fd.MismatchError):
        fd.remove_process_set(other)
    assert fd.remove_process_set(process_set)


# ---- groups


@pytest.mark.parametrize("op", [fd.Sum, fd.Adasum])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2), (0, 1), (0, 2), (1, 0), (1, 3)])
def test_groups_of_different_sizes(ours: int, theirs: int, named: bool, op: Any) -> None:
    name = "uneven" if named else None
    for _ in range(3):
        count = ours if fd.rank() == last() else theirs
        handle = fd.grouped_allreduce_async([np.ones(2)] * count, op=op, name=name)
        with pytest.raises(fd.MismatchError, match=f"group size is {theirs}.*{ours}"):
            handle.wait()
        for same in (3, 2, 1, 0):
            results = fd.grouped_allreduce([np.ones(2)] * same, op=fd.Sum, name=name)
            assert [x.tolist() for x in results] == [[fd.size()] * 2] * same
        assert fd.allreduce(np.ones(1), op=fd.Sum).tolist() == [fd.size()]


def test_who_refuses_a_group_may_call_it_again_at_once() -> None:
    """Before its peers have called it at all."""
    for name in ("refused first", None):
        if fd.rank() == last():
            for wrong in (None, [np.ones(1), "text"], [np.ones(1)] * 2):
                with pytest.raises((TypeError, ValueError)):
                    fd.grouped_allreduce(wrong, op="Sum", name=name)
            handle = fd.grouped_allreduce_async([np.ones(1)] * 4, op=fd.Sum, name=name)
            MPI.COMM_WORLD.Barrier()
        else:
            MPI.COMM_WORLD.Barrier()
            for count in (4, 1, 2):
                with pytest.raises((TypeError, ValueError), match=f"rank {last()} refused"):
                    fd.grouped_allreduce([np.ones(1)] * count, op=fd.Sum, name=name)
            handle = fd.grouped_allreduce_async([np.ones(1)] * 4, op=fd.Sum, name=name)
        assert [x.tolist() for x in handle.wait()] == [[fd.size()]] * 4


def test_unnamed_groups_after_join_and_after_a_mismatch() -> None:
    """Their order is one over all operations, and goes on where joined ranks come back."""
    if fd.rank() == 0:
        for _ in range(3):
            fd.grouped_allreduce([np.ones(1)] * 2, op=fd.Sum)
    fd.join()
    results = fd.grouped_allreduce([np.ones(1)] * 2, op=fd.Sum)
    assert [x.tolist() for x in results] == [[fd.size()]] * 2
    with pytest.raises(fd.MismatchError):
        (fd.grouped_allreduce if fd.rank() else fd.grouped_allgather)([np.ones(1)] * 2)
    results = fd.grouped_allreduce([np.ones(1)] * 2, op=fd.Sum)
    assert [x.tolist() for x in results] == [[fd.size()]] * 2


def test_a_refusal_while_a_call_of_that_name_is_in_flight() -> None:
    """The peers' next call of the name fails; neither the one in flight nor those after it do."""
    x = np.full(3, 1.0 + fd.rank())
    total = sum(1.0 + rank for rank in range(fd.size()))
    last = fd.size() - 1
    for turn in range(3):
        handle = None
        if fd.rank() != last:
            handle = fd.allreduce_async(x, op=fd.Sum, name="refused behind")
        if fd.rank() == 0:
            with pytest.raises(TypeError):
                fd.allreduce_async(None, op=fd.Sum, name="refused behind")
        fd.barrier(name=f"the first is under way {turn}")
        if handle is None:
            handle = fd.allreduce_async(x, op=fd.Sum, name="refused behind")
        assert handle.wait().tolist() == [total] * 3
        if fd.rank() != 0:
            with pytest.raises(TypeError, match="rank 0"):
                fd.allreduce(x, op=fd.Sum, name="refused behind")
        assert fd.allreduce(x, op=fd.Sum, name="refused behind").tolist() == [total] * 3
