# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend `farandole`: calls that share memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness.c10d import backend  # noqa: F401 (a fixture of all tests)

pytestmark = [pytest.mark.ranks(2, 3)]


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
