# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend `farandole`: calls that share memory."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

import farandole as hvd
from farandole.arrays import buffers
from farandole.c10d import memory_in_use
from harness.c10d import backend  # noqa: F401 (a fixture of all tests)
from harness.moments import at_each_moment

pytestmark = [pytest.mark.ranks(2, 3)]  # marks of one test narrow it


@pytest.mark.parametrize("count", [4, 5000, 300_000])
def test_a_group_carries_out_calls_on_one_tensor_in_order(count: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    sum_of_ranks = sum(1.0 + r for r in range(size))
    x = torch.full((count,), 1.0 + rank)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    for work in reversed(works):
        work.wait()
    assert (x == sum_of_ranks * size**2).all()
    parts = [torch.zeros(count) for _ in range(size)]
    x.fill_(1.0 + rank)
    gathered = dist.all_gather(parts, x, async_op=True)
    dist.all_reduce(parts[-1])  # of what it has gathered
    dist.broadcast(x, 0)  # which it must have sent before
    gathered.wait()
    assert [float(part[-1]) for part in (parts[0], parts[-1], x)] == [1.0, size * size, 1.0]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("count", [4, 5000, 300_000])
def test_inputs_may_lie_within_results(count: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    expected = torch.arange(1.0, size + 1).repeat_interleave(count)
    for begin in (rank * count, 0, (size - 1) * count, count // 2):
        whole = torch.zeros(size * count)
        own = whole[begin : begin + count].fill_(1.0 + rank)
        dist.all_gather_into_tensor(whole, own)
        assert torch.equal(whole, expected), begin
    for begin in (rank * count, 0, count // 2):
        whole = torch.arange(float(size * count)) * (1 + rank)
        before = whole.clone()
        part = whole[begin : begin + count]
        dist.reduce_scatter_tensor(part, whole)
        total = torch.arange(float(size * count)) * sum(range(1, size + 1))
        before[begin : begin + count] = total[rank * count : (rank + 1) * count]
        assert torch.equal(whole, before), begin


def test_calls_that_copy_wait_for_earlier_writers() -> None:
    """Each second call sends a copy, which must be made after the first one's end."""
    size, count = dist.get_world_size(), 300_000

    def first() -> tuple[torch.Tensor, dist.Work]:
        x = torch.ones(size * count)
        return x, dist.all_reduce(x, async_op=True)

    x, work = first()
    part = torch.zeros(count)
    dist.reduce_scatter(part, list(x.chunk(size)))
    assert (part == size * size).all()
    x, work = first()
    parts = [torch.zeros(count) for _ in range(size)]
    dist.all_to_all(parts, list(x.chunk(size)))
    assert all((part == size).all() for part in parts)
    x, work = first()
    halves = [torch.zeros(size * count // 2) for _ in range(size)]
    dist.all_gather(halves, x[::2])
    assert all((half == size).all() for half in halves)
    work.wait()


def test_strided_and_sparse_tensors_in_order() -> None:
    size = dist.get_world_size()
    matrix = torch.ones(701, 701)
    sparse = torch.tensor([1.0, 1.0, 0.0, 0.0]).to_sparse()
    for x in (matrix.t(), sparse):
        for work in [dist.all_reduce(x, async_op=True) for _ in range(2)]:
            work.wait()
    assert (matrix == size * size).all()
    assert sparse.to_dense().tolist() == [size * size, size * size, 0.0, 0.0]


def test_columns_of_one_matrix_do_not_wait_for_each_other() -> None:
    """Halves of a halo exchange: each receive would wait for the other one for ever."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    u = torch.full((50, 6), float(rank))
    works = [
        dist.irecv(u[:, 0], before, tag=1),
        dist.irecv(u[:, 5], after, tag=2),
        dist.isend(u[:, 1], before, tag=2),
        dist.isend(u[:, 4], after, tag=1),
    ]
    for work in works:
        work.wait()
    assert u[0].tolist() == [before, rank, rank, rank, rank, after]


@pytest.mark.ranks(3)
def test_a_root_may_send_one_tensor_to_two_groups_at_once() -> None:
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    x, token = torch.full((10,), float(rank)), torch.zeros(1)
    if rank == 0:
        for work in [dist.broadcast(x, 0, group, async_op=True) for group in (first, second)]:
            work.wait()
    elif rank == 1:  # only after rank 2 has its copy
        dist.recv(token, 2)
        dist.broadcast(x, 0, first)
    else:
        dist.broadcast(x, 0, second)
        dist.send(token, 1)
    assert (x == 0.0).all()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_calls_of_a_signal_handler_keep_no_tensor() -> None:
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    used: list[weakref.ref[torch.Tensor]] = []

    def gather(count: int) -> None:
        x, y = (
            torch.ones(count),
            torch.zeros(count),
        )  # too large for _kept
        used.extend(map(weakref.ref, (x, y)))
        work = dist.all_gather_into_tensor(y, x, group=own, async_op=True)
        assert work is not None
        work.wait()

    assert at_each_moment(partial(gather, 1000), partial(gather, 2000)) > 50
    gc.collect()
    assert [ref for ref in used if ref() is not None] == []


def sum_of_ranks(name: str, x: torch.Tensor) -> hvd.Handle:
    """A call of farandole's that writes to `x`. It ends once the last rank has made it, too."""
    return hvd.allreduce_async_(x, op=hvd.Sum, name=name)


@pytest.mark.ranks(2)
def test_a_strided_receive_does_not_write_memory_in_use() -> None:
    """What has arrived is copied to its place, which the core does not see."""
    rank = dist.get_rank()
    u = torch.full((50, 6), float(rank))
    for turn in range(2):
        if rank == 0:
            handle = sum_of_ranks("memory.base", u)
            with pytest.raises(ValueError, match=r"memory is in use by 'memory\.base'"):
                dist.irecv(u[:, 0], 1)
            dist.barrier()
        else:
            with pytest.raises(ValueError, match=r"memory is in use by 'memory\.base'"):
                dist.send(u[:, 0], 0)
            dist.barrier()
            handle = sum_of_ranks("memory.base", u)
        handle.wait()
        assert (u == 2.0**turn).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["a strided receive", "columns", "a list"])
def test_a_copied_result_is_not_written_to_memory_in_use(kind: str) -> None:
    """The call that uses it was started later, and must not see the copy. The other rank has its
    result, so rank 0 leaves the job."""
    rank = dist.get_rank()
    u = torch.full((50, 6), float(rank))
    if kind == "a strided receive":
        work = dist.irecv(u[:, 0], 1) if rank == 0 else dist.isend(u[:, 0].clone(), 0)
    elif kind == "columns":
        work = dist.all_reduce(u[:, 0], async_op=True)
    else:
        parts = [u[:25], u[25:]]
        work = dist.all_gather(parts, torch.full((25, 6), float(rank)), async_op=True)
    if rank == 0:
        handle = sum_of_ranks("memory.later", u)
        with pytest.raises(ValueError, match=r"memory is in use by 'memory\.later'"):
            work.wait()
        with pytest.raises((hvd.ShutdownError, hvd.PeerError), match="memory is in use"):
            handle.wait()
        assert (u == 0.0).all()
    else:
        work.wait()
        with pytest.raises(hvd.PeerError, match=r"rank 0 left: ValueError: .*memory is in use"):
            dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    hvd.init()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_core_is_asked_once_about_each_tensor_of_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of the core for each: only those that are copied, from or to."""
    asked, size = [], dist.get_world_size()
    ask = buffers.check_unused

    def count(address: int, *more: object) -> None:
        asked.append(address)
        ask(address, *more)

    xs = [torch.full((3,), float(dist.get_rank())) for _ in range(size)]
    y, whole = torch.zeros(3), torch.zeros(3 * size)
    monkeypatch.setattr(buffers, "check_unused", count)
    lists = {
        "reduce_scatter": lambda: dist.reduce_scatter(y, xs),
        "all_reduce": lambda: dist.all_reduce(y, group=dist.new_group()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, y),
    }
    wanted = {"reduce_scatter": size, "all_reduce": 0, "all_gather_into_tensor": 0}
    for kind, call in lists.items():
        asked.clear()
        call()
        assert len(asked) == wanted[kind], kind
    asked.clear()
    dist.all_gather(xs, y)
    assert len(asked) == 2 * size  # before it starts, and before it copies the rows


def test_calls_that_nobody_waits_for_are_not_kept() -> None:
    rank = dist.get_rank()
    for _ in range(50):
        x = torch.zeros(1000)
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    assert not memory_in_use.count(), rank
