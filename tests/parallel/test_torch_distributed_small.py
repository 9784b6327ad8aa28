# SPDX-License-Identifier: Apache-2.0
"""Small calls of torch.distributed, made again and again: blocking ones need no coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import farandole as fd
from farandole.topology import local_size
from harness.c10d import backend  # noqa: F401 (a fixture of all tests)
from harness.cells import count_in_cells

pytestmark = [
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
TURNS = 12


def values(rank: int, turn: int, elements: int) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.float64) + 1000.0 * rank + 100_000.0 * turn


def total(turn: int, elements: int) -> torch.Tensor:
    ranks = range(dist.get_world_size())
    return torch.stack([values(rank, turn, elements) for rank in ranks]).sum(0)


def of_all(turn: int, elements: int) -> torch.Tensor:
    return torch.cat([values(rank, turn, elements) for rank in range(dist.get_world_size())])


def all_reduce(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    x = values(dist.get_rank(), turn, elements)
    work = dist.all_reduce(x, async_op=not blocks)
    return work, lambda: torch.testing.assert_close(x, total(turn, elements), rtol=0, atol=0)


def average(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    x = values(dist.get_rank(), turn, elements)
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=not blocks)
    mean = total(turn, elements) / dist.get_world_size()
    return work, lambda: torch.testing.assert_close(x, mean)


def broadcast(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    root = turn % dist.get_world_size()
    x = values(dist.get_rank(), turn, elements)
    work = dist.broadcast(x, root, async_op=not blocks)
    return work, lambda: torch.testing.assert_close(x, values(root, turn, elements))


def gather(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    whole = torch.empty(dist.get_world_size() * elements, dtype=torch.float64)
    x = values(dist.get_rank(), turn, elements)
    work = dist.all_gather_into_tensor(whole, x, async_op=not blocks)
    return work, lambda: torch.testing.assert_close(whole, of_all(turn, elements))


def gather_in_place(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    """As FSDP: a rank's input is its place in the output."""
    whole = torch.empty(dist.get_world_size() * elements, dtype=torch.float64)
    x = whole[dist.get_rank() * elements :][:elements]
    x.copy_(values(dist.get_rank(), turn, elements))
    work = dist.all_gather_into_tensor(whole, x, async_op=not blocks)
    return work, lambda: torch.testing.assert_close(whole, of_all(turn, elements))


def scatter(turn: int, elements: int, blocks: bool) -> tuple[Any, Callable[[], None]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = values(rank, turn, size * elements)
    y = torch.empty(elements, dtype=torch.float64)
    work = dist.reduce_scatter_tensor(y, whole, async_op=not blocks)
    own = total(turn, size * elements)[rank * elements :][:elements]
    return work, lambda: torch.testing.assert_close(y, own, rtol=0, atol=0)


KINDS = {one.__name__: one for one in (all_reduce, average, broadcast, gather, scatter)}
KINDS["gather_in_place"] = gather_in_place


@pytest.mark.parametrize("elements", [1, 100, 3000, 40_000])
@pytest.mark.parametrize("kind", KINDS)
def test_results(kind: str, elements: int) -> None:
    for turn in range(TURNS):
        _, check = KINDS[kind](turn, elements, blocks=True)
        check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_blocking_call_meets_an_asynchronous_one(kind: str) -> None:
    for turn in range(TURNS):
        blocks = turn % dist.get_world_size() == dist.get_rank()
        work, check = KINDS[kind](turn, 50, blocks=blocks)
        if work is not None:
            work.wait()
        check()


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "gather", "scatter", "barrier"])
def test_they_need_no_coordinator(kind: str) -> None:
    """After the first calls, which all ranks agree on."""
    if local_size() < dist.get_world_size():
        pytest.skip("needs all ranks on one host")
    group: Any = dist.group.WORLD
    options: Any = {
        "allreduce": c10d.AllreduceOptions,
        "broadcast": c10d.BroadcastOptions,
        "gather": c10d.AllgatherOptions,
        "scatter": c10d.ReduceScatterOptions,
        "barrier": c10d.BarrierOptions,
    }[kind]()
    if not hasattr(options, "asyncOp"):
        pytest.skip("this torch does not say that it waits")
    options.asyncOp = False
    if kind == "broadcast":
        options.rootRank = 0
    size = dist.get_world_size()
    x, whole = torch.zeros(3), torch.zeros(3 * size)
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: group.allreduce([x], options),
        "broadcast": lambda: group.broadcast([x], options),
        "gather": lambda: group._allgather_base(whole, x, options),
        "scatter": lambda: group._reduce_scatter_base(x, whole, options),
        "barrier": lambda: group.barrier(options),
    }
    for _ in range(TURNS):
        if (work := calls[kind]()) is not None:
            work.wait()
    assert count_in_cells(TURNS) > 0


@pytest.mark.parametrize("elements", [10, 200_000])
def test_a_blocking_call_has_a_work_until_it_is_done(elements: int) -> None:
    group: Any = dist.group.WORLD
    options: Any = c10d.AllreduceOptions()
    if not hasattr(options, "asyncOp"):
        pytest.skip("this torch does not say that it waits")
    options.asyncOp = False
    without = 0
    for turn in range(TURNS):
        x = values(dist.get_rank(), turn, elements)
        work = group.allreduce([x], options)
        without += work is None
        if work is not None:
            work.wait()
        assert torch.equal(x, total(turn, elements))
    assert without > 0


def test_works_have_their_results() -> None:
    group: Any = dist.group.WORLD
    for turn in range(3):
        x = values(dist.get_rank(), turn, 10)
        work = group.allreduce([x], c10d.AllreduceOptions())
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert work.get_future().wait()[0] is x
        assert torch.equal(x, total(turn, 10))


def test_layouts_that_change() -> None:
    """Some need copies, some not; the form of the call is the same."""
    size = dist.get_world_size()
    for turn in range(TURNS):
        whole = torch.zeros(4, 6, dtype=torch.float64)
        x = whole[:, :3] if turn % 3 == 1 else torch.zeros(4, 3, dtype=torch.float64)
        x.copy_(values(dist.get_rank(), turn, 12).view(4, 3))
        dist.all_reduce(x)
        assert torch.equal(x, total(turn, 12).view(4, 3))
        assert not whole[:, 3:].any()
        out = torch.empty(size * 4, 3, dtype=torch.float64)
        x.copy_(values(dist.get_rank(), turn, 12).view(4, 3))
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out.view(-1), of_all(turn, 12))


def test_a_barrier_waits_for_calls_that_were_dropped() -> None:
    for turn in range(TURNS):
        x = values(dist.get_rank(), turn, 30_000)
        dist.all_reduce(x, async_op=True)
        dist.barrier()
        assert torch.equal(x, total(turn, 30_000))


def test_an_output_over_its_input() -> None:
    """Its form is that of a call that needs no copy."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for turn in range(TURNS):
        whole = values(rank, turn, 4 * size)
        y = whole[1:5] if turn % 3 == 1 else torch.zeros(4, dtype=torch.float64)
        dist.reduce_scatter_tensor(y, whole)
        assert torch.equal(y, total(turn, 4 * size)[4 * rank :][:4])
        out = torch.zeros(4 * size, dtype=torch.float64)
        x = out[1:5] if turn % 3 == 1 else torch.zeros(4, dtype=torch.float64)
        x.copy_(values(rank, turn, 4))
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out, of_all(turn, 4))


def test_a_group_of_one_rank_gathers_in_place_and_apart() -> None:
    """Both calls have tensors of one shape."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for turn in range(3):
        x, y = values(dist.get_rank(), turn, 5), torch.zeros(5, dtype=torch.float64)
        dist.all_gather_into_tensor(x, x, group=own)
        dist.all_gather_into_tensor(y, x, group=own)
        assert torch.equal(y, values(dist.get_rank(), turn, 5))


def test_a_rank_that_differs() -> None:
    """Its peers get the error that the coordinator finds."""
    for _ in range(3):
        for turn in range(3):
            all_reduce(turn, 5, blocks=True)[1]()
        x = torch.zeros(5 + dist.get_rank())
        with pytest.raises(fd.MismatchError):
            dist.all_reduce(x)
