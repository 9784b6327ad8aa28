# SPDX-License-Identifier: Apache-2.0
"""Tables and results while some ranks have joined: every member keeps its place."""

import math

import numpy as np
import pytest

import farandole as fd
import farandole.numpy
from farandole.ops.gathers import grouped_allgather_rows
from farandole.process_sets import disband_process_set, form_process_set
from harness.joins import in_turns

pytestmark = pytest.mark.ranks(2, 3, 4)
WIDTHS = [3, 20_000]  # of rows that travel in the log, and in buckets


def rows_of(rank: int, rows: int, width: int) -> np.ndarray:
    """Rows that differ by rank and by row."""
    return np.repeat(np.arange(100 * rank, 100 * rank + rows), width).reshape(rows, width)


@pytest.mark.parametrize("width", WIDTHS)
@in_turns
def test_allgather_has_a_row_for_each_member(active: list[int], width: int) -> None:
    sent = [rows_of(fd.rank(), fd.rank() + more, width) for more in (1, 2)]
    pairs = grouped_allgather_rows(sent, name="all").wait()
    for more, (result, table) in zip((1, 2), pairs, strict=True):
        counts = [rank + more if rank in active else 0 for rank in range(fd.size())]
        assert list(table) == counts
        whole = np.concatenate([rows_of(rank, rank + more, width) for rank in active])
        np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("given", [False, True])
@in_turns
def test_alltoall_has_a_row_for_each_member(active: list[int], given: bool, width: int) -> None:
    size, own = fd.size(), fd.rank()
    splits = [to + 1 if given else 2 for to in range(size)]
    first = sum(splits[:own])
    rows, table = fd.alltoall_async(
        rows_of(own, sum(splits), width), splits if given else None, name="to all"
    ).wait()
    assert table.tolist() == [splits[own] if rank in active else 0 for rank in range(size)]
    whole = [rows_of(rank, sum(splits), width)[first : first + splits[own]] for rank in active]
    np.testing.assert_array_equal(rows, np.concatenate(whole))


@pytest.mark.parametrize("width", WIDTHS)
@in_turns
def test_parts_of_joined_ranks_are_dropped(active: list[int], width: int) -> None:
    size, own = fd.size(), fd.rank()
    total = fd.reducescatter(rows_of(own, 2 * size, width), op=fd.Sum, name="parts")
    whole = sum(rows_of(rank, 2 * size, width) for rank in active)
    np.testing.assert_array_equal(total, whole[2 * own : 2 * own + 2])


OPS = {
    "Average": lambda xs: sum(xs) / fd.size(),
    "Sum": sum,
    "Min": min,
    "Max": max,
    "Product": math.prod,
}


@pytest.mark.parametrize("name", [None, "reduced"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", WIDTHS)
@in_turns
def test_joined_ranks_count_in_an_average_only(
    active: list[int], width: int, op: str, name: str | None
) -> None:
    found = fd.allreduce(np.full(width, fd.rank() + 2.0), op=getattr(fd, op), name=name)
    np.testing.assert_allclose(found, OPS[op]([rank + 2.0 for rank in active]))


@pytest.mark.parametrize("name", [None, "objects"])
@in_turns
def test_lists_of_objects_have_a_place_for_each_member(active: list[int], name: str | None) -> None:
    told = fd.allgather_object({"of": "x" * 300 * fd.rank()}, name)
    expected = [{"of": "x" * 300 * rank} if rank in active else None for rank in range(fd.size())]
    assert told == expected
    fd.barrier()  # joined ranks need not come


@in_turns
def test_models_of_the_active_ranks_are_broadcast(active: list[int]) -> None:
    model = {"w": np.full(3, float(fd.rank()))}
    farandole.numpy.broadcast_parameters(model, active[-1])
    assert model["w"].tolist() == [active[-1]] * 3
    assert fd.broadcast_object(fd.rank(), active[0]) == active[0]


ROOTED = {
    "broadcast": lambda root: fd.broadcast(np.ones(3), root, name="x"),
    "broadcast of many": lambda root: fd.broadcast_(np.ones(30_000), root, name="x"),
    "object": lambda root: fd.broadcast_object({"rank": fd.rank()}, root, name="x"),
    "parameters": lambda root: farandole.numpy.broadcast_parameters([np.ones(3)], root),
}


@pytest.mark.parametrize("call", ROOTED)
@in_turns
def test_a_root_that_has_joined_is_an_error_on_all(active: list[int], call: str) -> None:
    root = next(rank for rank in range(fd.size()) if rank not in active)
    with pytest.raises(
        ValueError, match=rf"root rank {root} .*has joined: choose a different root"
    ):
        ROOTED[call](root)


@in_turns
def test_a_new_set_has_no_joined_member(active: list[int]) -> None:
    gone = [rank for rank in range(fd.size()) if rank not in active]
    says = rf"ranks? {gone[0]}.* joined, .*add sets before join"
    with pytest.raises(ValueError, match=says):
        form_process_set(list(range(fd.size())), f"all {active}", 60)
    with pytest.raises(ValueError, match=says):
        fd.add_process_set(gone)
    members = form_process_set(active, f"active {active}", 60)
    assert fd.allreduce(np.ones(3), op=fd.Sum, process_set=members).tolist() == [len(active)] * 3
    disband_process_set(members, f"end of {active}")
