# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend `farandole`: groups, futures, threads and errors."""

from __future__ import annotations

import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import farandole.torch as hvd
from harness.c10d import backend, since  # noqa: F401 (a fixture of all tests)

pytestmark = [
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.filterwarnings(
        "ignore:.*is deprecated:FutureWarning"
    ),  # names of torch before 2.13
]


def sum_of(group: Any, rank: int) -> float:
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x, group=group)
    return float(x)


def test_groups() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    ends, again, alone = dist.new_group([0, n - 1]), dist.new_group([n - 1, 0]), dist.new_group([1])
    local = dist.new_group([0, 1], use_local_synchronization=True)
    if rank in (0, n - 1):
        assert dist.get_rank(ends) == (0 if rank == 0 else 1)
        assert dist.get_world_size(ends) == 2
        assert dist.get_process_group_ranks(ends) == [0, n - 1]
        if rank == 0:  # no order between groups, though they have the same ranks
            works = [dist.barrier(group, async_op=True) for group in (ends, again)]
        else:
            works = [dist.barrier(group, async_op=True) for group in (again, ends)]
        for work in works:
            work.wait()
        assert sum_of(ends, rank) == 1 + 10.0 ** (n - 1)
        x = torch.tensor([float(rank)])
        dist.broadcast(x, src=n - 1, group=ends)
        assert float(x) == n - 1
    if rank == 1:
        assert sum_of(alone, rank) == 10.0
    if rank <= 1:
        assert sum_of(local, rank) == 11.0
        dist.destroy_process_group(local)
    assert sum_of(None, rank) == sum(10.0**r for r in range(n))


def test_groups_of_groups() -> None:
    """Each half makes groups that the other one does not know of; torch gives them one name."""
    n, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(list(range(k, n, 2))) for k in range(2)]
    own = halves[rank % 2]
    alone, _ = dist.new_subgroups(group_size=1, group=own)
    assert sum_of(alone, rank) == 10.0**rank
    assert sum_of(own, rank) == sum(10.0**r for r in range(rank % 2, n, 2))


def test_split() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    world: Any = dist.group.WORLD
    even, odd = list(range(0, n, 2)), list(range(1, n, 2))
    mine = even if rank in even else odd
    part = world.split_group(mine, group_name=f"split{rank % 2}", group_desc="a half")
    x = torch.tensor([10.0**rank])
    part.allreduce([x]).wait()
    assert float(x) == sum(10.0**r for r in mine)
    assert (part.size(), part.rank()) == (len(mine), mine.index(rank))
    assert (part.group_name, part.group_desc) == (f"split{rank % 2}", "a half")
    assert world.split_group([r for r in range(n) if r != rank][:1], group_name="others") is None
    part.shutdown()


def test_again_and_again() -> None:
    """More groups than there may be sets at once, and a world that begins anew."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(70):
        group = dist.new_group([0, 1])
        if rank <= 1:
            dist.barrier(group)
            dist.destroy_process_group(group)
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("farandole")
        assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size()) == (rank, n)
        assert sum_of(dist.new_group(list(range(n))), rank) == sum(10.0**r for r in range(n))


def test_init_process_group_starts_farandole() -> None:
    dist.destroy_process_group()
    hvd.shutdown()
    dist.init_process_group("farandole")
    assert hvd.is_initialized()
    assert hvd.size() == dist.get_world_size()
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from {rank}", str(rank))
    assert store.get(f"from {1 - min(rank, 1)}") == str(1 - min(rank, 1)).encode()
    dist.barrier()  # rank 0 serves the store


def test_the_store_of_a_job_on_one_host_is_not_open_to_networks() -> None:
    """Under mpirun farandole opens it for torch. It has no limit for strangers."""
    if hvd.local_size() < hvd.size():
        pytest.skip("needs all ranks on one host")
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):  # as from another network: also this host's
        socket.create_connection(("127.0.0.2", store.port))
    dist.barrier()  # rank 0 serves the store


def test_beside_farandoles_own_calls() -> None:
    rank, n = hvd.rank(), hvd.size()
    x = torch.tensor([float(rank)])
    work = dist.all_reduce(x, async_op=True)
    y = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum)
    work.wait()
    assert float(x) == float(y) == n * (n - 1) / 2


# ---- futures and threads


def test_a_callback_may_wait_for_later_work() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x, y = torch.tensor([float(rank)]), torch.tensor([1.0])

    def then(future: Any) -> float:
        inner = dist.all_reduce(y, async_op=True).get_future()
        return float(future.value()[0]) + float(inner.wait()[0])

    future = dist.all_reduce(x, async_op=True).get_future().then(then)
    assert future.wait() == n * (n - 1) / 2 + n


def test_calls_of_callbacks_are_matched_by_their_future() -> None:
    """Ranks run callbacks before or after their next call."""
    n, xs = dist.get_world_size(), [torch.full((4,), 1.0), torch.full((4,), 100.0)]

    def start(x: torch.Tensor) -> Any:
        return dist.all_reduce(x, async_op=True)

    def again(future: Any) -> Any:
        return start(future.value()[0] * 10).get_future().wait()

    def twice(work: Any) -> Any:
        return work.get_future().then(again).then(again).wait()[0]

    if dist.get_rank() == 0:
        found = [twice(start(x)) for x in xs]
    else:
        found = [twice(work) for work in [start(x) for x in xs]]
    assert [x.tolist() for x in found] == [[k * (10 * n) ** 2 * n] * 4 for k in (1, 100)]


def test_callbacks_may_call_groups_that_other_ranks_are_not_in() -> None:
    """Sums of each rank's own group, in its callback of all leaders, and of all ranks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    own = [dist.new_group([r]) for r in range(n)][rank]
    leader = dist.new_group([0])
    x = torch.ones(2)

    def call(_: Any) -> torch.Tensor:
        if rank == 0:
            dist.all_reduce(x, group=leader)
        dist.all_reduce(x)
        return x

    for group in (own, None):
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        assert future.then(call).wait() is x
    assert x.tolist() == [n**3] * 2


def test_any_thread_may_call() -> None:
    found = []

    def call() -> None:
        found.append(sum_of(None, dist.get_rank()))

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
    assert found == [sum(10.0**r for r in range(dist.get_world_size()))] * 6


def test_dropped_work_is_done_all_the_same() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = [torch.full((1000,), float(rank)) for _ in range(20)]
    for x in xs:
        dist.all_reduce(x, async_op=True)
    dist.barrier()
    for x in xs:
        assert x.tolist() == [n * (n - 1) / 2] * 1000


# ---- errors


def fails(kind: type[Exception], pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=pattern):
        call()


def test_mismatches() -> None:
    rank = dist.get_rank()
    odd = rank == 0
    fails(hvd.MismatchError, "shape is .* on rank 0", lambda: dist.all_reduce(torch.ones(3 - odd)))
    dtype = torch.float64 if odd else torch.float32
    fails(hvd.MismatchError, "dtype", lambda: dist.broadcast(torch.ones(3, dtype=dtype), 0))
    op = ReduceOp.MAX if odd else ReduceOp.SUM
    fails(hvd.MismatchError, "is Max on rank 0", lambda: dist.all_reduce(torch.ones(3), op))
    fails(hvd.MismatchError, "root rank", lambda: dist.broadcast(torch.ones(3), int(odd)))
    call = dist.barrier if odd else lambda: dist.all_reduce(torch.ones(3))
    fails(hvd.MismatchError, "operation is barrier on rank 0", call)
    outs = [torch.ones(2 + odd) for _ in range(dist.get_world_size())]
    fails(hvd.MismatchError, "shape", lambda: dist.all_gather(outs, outs[0]))
    future = dist.all_reduce(torch.ones(3 - odd), async_op=True).get_future()
    fails(hvd.MismatchError, "shape", future.wait)
    assert sum_of(None, rank) > 0


def test_what_one_rank_gets_wrong_fails_on_all() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(2, 2)
    short = [torch.ones(2, 2) for _ in range(n - (rank == 0))]
    fails(ValueError, f"output_list has {n - 1} tensors for {n}", lambda: dist.all_gather(short, x))
    group: Any = dist.group.WORLD
    wide = torch.ones(n + (rank > 0), 4)
    fails(ValueError, "needs", lambda: group._allgather_base(wide, x).wait())
    sparse = x.to_sparse() if rank == 0 else x
    fails(hvd.MismatchError, "ranks disagree", lambda: dist.all_reduce(sparse))
    fails(TypeError, "layout", lambda: dist.broadcast(sparse, 0))
    meta = x.to("meta") if rank == 1 else x
    fails(TypeError, "meta", lambda: dist.broadcast(meta, 0))
    out, rows = torch.ones(n * 2), torch.ones(n * 2 + (rank == 0))
    fails(ValueError, "split", lambda: dist.all_to_all_single(out, rows))
    assert sum_of(None, rank) > 0


def test_unequal_splits_name_the_sender() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = [1] * n
    if rank == 0:
        rows[1] = 2  # one more for rank 1 than that expects
    work = dist.all_to_all_single(torch.ones(n), torch.ones(sum(rows)), None, rows, async_op=True)
    if rank == 1:
        fails(hvd.MismatchError, "rank 0 sent 2, not 1", work.wait)
    else:
        work.wait()


@pytest.mark.ranks(3, 4)
def test_groups_that_differ() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    wanted = [0, 1] if rank == 0 else list(range(n))
    fails(hvd.MismatchError, r"shape is \(0, 1\) on rank 0", lambda: dist.new_group(wanted))
    assert sum_of(None, rank) > 0


def test_time_out_names_who_is_missing() -> None:
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank != 1:
        missing = r"ranks? [\d, ]*\b1\b"  # and whoever is slow
        with pytest.raises(hvd.StallError, match=missing):
            dist.barrier(group)
        work = dist.barrier(group, async_op=True)
        with pytest.raises(hvd.StallError, match=missing):
            work.wait(timedelta(seconds=0.1))
        with pytest.raises(hvd.StallError, match=missing):
            work.get_future().wait()
    hvd.barrier(name="all have waited")
    if rank == 1:
        for _ in range(2):
            dist.barrier(group, async_op=True).wait(timedelta(seconds=60))
    hvd.barrier(name="all have met")


@since(2, 10)  # before (seen in 2.6), destroy_process_group only forgets the group
def test_after_the_end() -> None:
    group: Any = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(hvd.ShutdownError, match="was destroyed"):
        group.allreduce([torch.ones(1)])
    dist.init_process_group("farandole")
    group = dist.group.WORLD
    hvd.shutdown()
    with pytest.raises(hvd.ShutdownError, match="shut down"):
        group.allreduce([torch.ones(1)])
    dist.destroy_process_group()


def test_a_future_of_a_group_that_has_ended() -> None:
    group: Any = dist.new_group()
    x = torch.ones(4)
    if dist.get_rank() > 0:
        dist.barrier()
    work = dist.all_reduce(x, group=group, async_op=True)
    if dist.get_rank() == 0:
        group.shutdown()
        future = work.get_future()
        dist.barrier()  # the others make the call now
        future.wait()
    work.wait()
    assert x.tolist() == [dist.get_world_size()] * 4


@pytest.mark.ranks(3)
def test_those_who_stay_use_and_make_groups_without_those_who_left() -> None:
    rank = hvd.rank()
    kept = hvd.add_process_set([0, 2])
    if rank == 1:
        hvd.shutdown()
    else:
        stay(rank, kept)
        hvd.shutdown()
    hvd.init()


def stay(rank: int, kept: hvd.ProcessSet) -> None:
    """Ranks 0 and 2, when rank 1 leaves."""
    left = ""
    while "rank 1 finished normally" not in left:
        for elements in (3, 50_000):
            x = torch.full((elements,), 10.0**rank)
            assert hvd.allreduce(x, op=hvd.Sum, process_set=kept).unique().tolist() == [101.0]
        try:
            hvd.allreduce(torch.ones(2), name="of all")
        except hvd.PeerError as error:
            left = str(error)
    for _ in range(2):
        group = dist.new_group([0, 2], use_local_synchronization=True)
        x = torch.full([3000], 10.0**rank)
        dist.all_reduce(x, group=group)
        assert x.unique().tolist() == [101.0]
        dist.destroy_process_group(group)
    assert hvd.remove_process_set(kept)
    pair = hvd.add_process_set([0, 2])
    assert hvd.allreduce(torch.tensor([10.0**rank]), op=hvd.Sum, process_set=pair)[0] == 101
    assert hvd.remove_process_set(pair)
    fails(hvd.PeerError, "rank 1 finished normally", lambda: hvd.add_process_set([0, 1]))
    wrong: Any = [0, 2] if rank == 0 else "no ranks"
    with pytest.raises((TypeError, ValueError)):
        hvd.add_process_set(wrong)


def test_a_world_that_is_not_farandoles() -> None:
    dist.destroy_process_group()
    n, rank = hvd.size(), hvd.rank()
    with pytest.raises(ValueError, match="leave both out"):  # on one rank
        dist.init_process_group("farandole", rank=rank, world_size=n + (rank == 1))
    store = dist.HashStore()
    with pytest.raises(ValueError, match=f"in farandole it is rank . of {n}"):
        dist.init_process_group("farandole", store=store, rank=(rank + 1) % n, world_size=n)


def test_deprecated_forms() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = [torch.full((2,), float(rank + k)) for k in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, whose class has changed
        dist.all_reduce_coalesced(xs)
    assert [x[0].item() for x in xs] == [n * (n - 1) / 2, n * (n + 1) / 2]
    group: Any = dist.group.WORLD
    x = torch.tensor([float(rank)])
    group.broadcast(x, 1).wait()
    assert x.item() == 1.0
    group.allreduce(x, op=ReduceOp.SUM).wait()
    assert x.item() == n
    group.monitored_barrier(timedelta(seconds=5))


def test_a_monitored_barrier_that_does_not_wait() -> None:
    group: Any = dist.new_group()
    if dist.get_rank() == 0:
        fails(hvd.StallError, "timeout of", lambda: group.monitored_barrier(timedelta(0)))
    hvd.barrier(name="rank 0 has tried")
    if dist.get_rank() != 0:
        group.monitored_barrier()
    hvd.barrier(name="all have met")


def test_a_library_that_would_not_wrap_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.destroy_process_group()
    monkeypatch.setitem(sys.modules, "ignite.distributed", types.ModuleType("ignite.distributed"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist.init_process_group("farandole")
    texts = [str(each.message) for each in told if "ignite" in str(each.message)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all("Remedy: wrap it in" in text for text in texts)
    dist.new_group([0, 1])  # the world only; another warning would be an error
