# SPDX-License-Identifier: Apache-2.0
"""Program-order mode: our buckets between torch.distributed's NCCL calls, under random delays."""

import os
import random
from time import perf_counter

import pytest

import farandole as fd
from harness.gpu_arrays import slow

os.environ["FARANDOLE_GPU_ORDER"] = "program"  # read by init(), which comes later

pytestmark = pytest.mark.ranks(2)
STEPS = 250  # of each seed: 1,000 in all
SIZES = (1, 1000, 300_000)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """torch.distributed over NCCL, with all our ranks."""
    import torch.distributed as dist

    fd.init()
    path = fd.broadcast_object(str(tmp_path_factory.mktemp("nccl") / "store"), 0)
    store = dist.FileStore(path, fd.size())
    dist.init_process_group("nccl", store=store, rank=fd.rank(), world_size=fd.size())
    yield dist
    dist.destroy_process_group()


def delay(own: random.Random) -> None:
    """On this rank's host or GPU, or neither: up to 0.2 ms."""
    import torch

    kind, seconds = own.randrange(3), own.uniform(0, 2e-4)
    if kind == 0:
        slow(torch.cuda.current_stream().cuda_stream, seconds)
    elif kind == 1:
        end = perf_counter() + seconds
        while perf_counter() < end:
            pass


@pytest.mark.parametrize("seed", range(4))
def test_interleaved_steps(nccl, seed):
    """The program is the same on all ranks; delays, and the order of submission, are not."""
    import torch

    program, own = random.Random(seed), random.Random(1000 * seed + fd.rank())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(STEPS):
        total = sum(1.0 + rank + step for rank in range(fd.size()))
        tensors = [
            torch.full((program.choice(SIZES),), 1.0 + fd.rank() + step, device="cuda")
            for _ in range(4)
        ]
        theirs, ours = tensors[0], list(enumerate(tensors[1:]))
        own.shuffle(ours)
        handles = []
        for i, x in ours:
            delay(own)
            handles.append(fd.allreduce_async_(x, op=fd.Sum, name=f"ours.{i}"))
        theirs_first = program.random() < 0.5
        if theirs_first:
            delay(own)
            nccl.all_reduce(theirs)
        for handle in handles:
            handle.wait()
        delay(own)
        if not theirs_first:
            nccl.all_reduce(theirs)
        for x in tensors:
            wrong += (x != total).sum()
    assert int(wrong) == 0
