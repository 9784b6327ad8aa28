# SPDX-License-Identifier: Apache-2.0
"""Backward passes while some ranks have joined: what was sent to them has a gradient of zeros, at
its own place."""

import pytest
import torch

import farandole.torch as hvd
from harness.gradients import CASES
from harness.joins import in_turns
from harness.toys import gradient_of, leaf

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.mark.parametrize("case", CASES)
@in_turns
def test_gradients(active: list[int], case: str) -> None:
    rows, call, right = CASES[case](active)
    x = leaf(rows)
    assert gradient_of(x, call(hvd, x)) == pytest.approx(right)


def test_a_rank_that_joins_before_its_backward_pass() -> None:
    """All have taken part forward."""
    size, own = hvd.size(), hvd.rank()
    for gone in range(size):
        active = [rank for rank in range(size) if rank != gone]
        x, y, z = leaf(size), leaf(own + 1), leaf(size)
        to_all = hvd.alltoall(x, name="x")
        whole = hvd.allgather(y, name="y")
        part = hvd.reducescatter(z, name="z")
        if own != gone:
            place = [own + 1.0 + 100 * to if to in active else 0.0 for to in range(size)]
            assert gradient_of(x, to_all) == place
            first = own * (own + 1) // 2
            total = [sum(first + i + 1 + 100 * r for r in active) / size for i in range(own + 1)]
            assert gradient_of(y, whole) == pytest.approx(total)
            kept = [1.0 + 100 * to if to in active else 0.0 for to in range(size)]
            assert gradient_of(z, part) == kept
        hvd.join()


@in_turns
def test_second_derivatives(active: list[int]) -> None:
    size = hvd.size()
    x = leaf(size)
    y = hvd.alltoall(x * x, name="x")
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    first.sum().backward()  # of x ** 4, where it was sent to somebody
    assert x.grad is not None
    sent = torch.tensor([float(rank in active) for rank in range(size)])
    assert x.grad[:, 0].tolist() == pytest.approx((12 * x[:, 0] ** 2 * sent).tolist())


@in_turns
def test_batch_statistics_are_those_of_the_active_ranks(active: list[int]) -> None:
    batches = {rank: torch.arange(12.0).reshape(4, 3) * (rank + 1) - rank for rank in active}
    weights = {rank: torch.arange(12.0).reshape(4, 3) + rank for rank in active}
    own = batches[hvd.rank()].requires_grad_()
    y = hvd.SyncBatchNorm(3, affine=False, name=f"layer {active}")(own)
    (y * weights[hvd.rank()]).sum().backward()
    whole = torch.cat([batches[rank].detach() for rank in active]).requires_grad_()
    expected = torch.nn.BatchNorm1d(3, affine=False)(whole)
    (expected * torch.cat([weights[rank] for rank in active])).sum().backward()
    place = active.index(hvd.rank())
    assert whole.grad is not None
    torch.testing.assert_close(y, expected.chunk(len(active))[place])
    torch.testing.assert_close(own.grad, whole.grad.chunk(len(active))[place])


@in_turns
def test_sparse_sums_and_optimizer_state(active: list[int]) -> None:
    size, own = hvd.size(), hvd.rank()
    mine = torch.zeros(size, 2)
    mine[own] = own + 1.0
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        total = hvd.sparse_allreduce_async(mine.to_sparse(1), "rows", op)().to_dense()
        rows = [(rank + 1.0) / divisor if rank in active else 0.0 for rank in range(size)]
        assert total[:, 0].tolist() == pytest.approx(rows)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=own + 1.0, momentum=0.9)
    hvd.broadcast_optimizer_state(optimizer, active[-1])
    assert optimizer.param_groups[0]["lr"] == active[-1] + 1.0
