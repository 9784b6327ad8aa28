# SPDX-License-Identifier: Apache-2.0
"""StoreBootstrap: ranks meet in a store of c10d, whatever earlier attempts have left in it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from farandole.c10d.meeting import StoreBootstrap
from farandole.errors import StallError
from harness.meetings import LONG, SECRET, SHORT, exchange, hosts, met, ranks, store
from harness.process import PATIENCE, Process

__all__ = ["hosts", "ranks", "store"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_again_and_again(store: HashStore, ranks: ThreadPoolExecutor, size: int) -> None:
    for _ in range(3):
        jobs = met([ranks.submit(StoreBootstrap, store, r, size, LONG) for r in range(size)])
        exchange(ranks, jobs)


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_that_gave_up_alone_meets_the_others_later(
    store: HashStore, ranks: ThreadPoolExecutor, early: int
) -> None:
    for _ in range(2):
        with pytest.raises(StallError, match=r"ranks \[\d.*did not come to the meeting"):
            StoreBootstrap(store, early, 3, SHORT)
    jobs = met([ranks.submit(StoreBootstrap, store, r, 3, LONG) for r in (2, 1, 0)])
    exchange(ranks, sorted(jobs, key=lambda job: job.rank))


def test_who_is_missing_is_named(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    jobs = [ranks.submit(StoreBootstrap, store, r, 4, 2.0) for r in (0, 1, 3)]
    for job in jobs:
        with pytest.raises(StallError, match=r"ranks \[2\] did not come"):
            job.result(LONG)


def test_rank_0_gives_up_and_comes_again(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """The others wait on, in the meeting that it has left."""
    patient = ranks.submit(StoreBootstrap, store, 1, 3, LONG)
    for _ in range(2):
        with pytest.raises(StallError, match=r"2\] did not come"):
            StoreBootstrap(store, 0, 3, SHORT)
    rest = [ranks.submit(StoreBootstrap, store, r, 3, LONG) for r in (0, 2)]
    exchange(ranks, sorted(met([patient, *rest]), key=lambda job: job.rank))


def test_worlds_of_other_sizes_in_one_store(store: HashStore, ranks: ThreadPoolExecutor) -> None:
    """torchrun's elastic restart: its count of restarts says nothing of a rescale."""
    attempt = PrefixStore("attempt 0", store)
    for size in (3, 2, 4, 3):
        jobs = [ranks.submit(StoreBootstrap, attempt, r, size, LONG) for r in range(size)]
        exchange(ranks, met(jobs))
        with pytest.raises(StallError):  # a rank that was started too early
            StoreBootstrap(attempt, size - 1, size, SHORT)


@pytest.mark.usefixtures("hosts")
def test_a_wait_that_timed_out_leaves_the_meeting_usable(
    store: HashStore, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", SECRET)
    first, second = met([ranks.submit(StoreBootstrap, store, r, 2, LONG) for r in range(2)])
    with pytest.raises(StallError, match=r"ranks \[1\]"):
        first.allgather(b"0", SHORT)
    assert second.allgather(b"1", LONG) == [b"0", b"1"]


PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import farandole.torch as hvd

path, rank = sys.argv[1], int(sys.argv[2])

def begin(seconds):
    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("farandole", store=store, rank=rank, world_size=2, timeout=limit)

if rank == 1:
    try:
        begin(1)
    except hvd.StallError as late:
        print(f"too early: {late}", flush=True)
begin(60)
x = torch.tensor([10.0 ** rank])
dist.all_reduce(x)
dist.all_reduce(x, group=dist.new_group([0, 1]))
print(f"rank {rank} has {x.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_world_size_without_a_rank_is_no_launcher(tmp_path: Path) -> None:
    """A script that torch.multiprocessing starts, and that keeps its size in the environment."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("if rank == 1:", "if False:"))
    command = [sys.executable, str(path), str(tmp_path / "store")]
    variables = {"FARANDOLE_RENDEZVOUS": "", "WORLD_SIZE": "2"}
    jobs = [Process([*command, str(rank)], variables) for rank in range(2)]
    with ExitStack() as stack:
        for job in jobs:
            stack.callback(job.kill)
        for job in jobs:
            result = job.wait(PATIENCE)
            assert result is not None, job.output
            assert "has 22" in result.check().out


CHILDREN = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, path, ends):
    import farandole.torch
    dist.init_process_group("farandole", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        exec(ends)
    else:
        try:
            dist.all_reduce(torch.ones(3))
        except farandole.PeerError as error:
            print("rank 0 heard:", error, flush=True)

if __name__ == "__main__":
    _, path, method, ends = sys.argv
    context = mp.get_context(method)
    ranks = [context.Process(target=train, args=(r, path, ends)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("ends", "heard"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("sys.exit(3)", "sys.exit(3)"),
        ("dist.all_reduce(torch.ones(3))", ""),
    ],
)
def test_children_of_multiprocessing_leave_as_others_do(
    tmp_path: Path, method: str, ends: str, heard: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(CHILDREN)
    command = [sys.executable, str(path), str(tmp_path / "store"), method, ends]
    job = Process(command, {"FARANDOLE_RENDEZVOUS": ""})
    with ExitStack() as stack:
        stack.callback(job.kill)
        result = job.wait(PATIENCE)
    assert result is not None, job.output
    assert "died" not in result.out
    assert ("rank 0 heard" in result.out) == bool(heard)
    assert heard in result.out


def test_init_process_group_again_after_a_time_out(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), str(tmp_path / "store")]
    early = Process([*command, "1"], {"FARANDOLE_RENDEZVOUS": ""})
    with ExitStack() as stack:
        stack.callback(early.kill)
        early.wait_for_output("ranks [0] did not come")
        late = Process([*command, "0"], {"FARANDOLE_RENDEZVOUS": ""})
        stack.callback(late.kill)
        for job in (early, late):
            result = job.wait(PATIENCE)
            assert result is not None, early.output + late.output
            assert "has 22" in result.check().out
