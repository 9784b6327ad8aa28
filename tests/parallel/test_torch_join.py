# SPDX-License-Identifier: Apache-2.0
"""Backward passes while some ranks have joined: what was sent to them has a gradient of zeros, at
its own place."""

import pytest
import torch
from torch import Tensor

import farandole.torch as hvd
from harness.joins import in_turns

pytestmark = pytest.mark.ranks(2, 3, 4)


def leaf(rows: int) -> Tensor:
    own = torch.arange(float(rows)) + 100 * hvd.rank()
    return own.repeat(3, 1).t().contiguous().requires_grad_()


def gradient_of(x: Tensor, y: Tensor) -> list[float]:
    """Of the sum of `y`, weighted by its row and this rank."""
    weights = torch.arange(1.0, len(y) + 1) + 100 * hvd.rank()
    (y * weights[:, None]).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert x.grad[:, 0].equal(x.grad[:, 2])
    return x.grad[:, 0].tolist()


@in_turns
def test_allgather(active: list[int]) -> None:
    x, other = leaf(hvd.rank() + 1), leaf(2)
    y, _ = hvd.grouped_allgather([x, other], name="all")
    assert len(y) == sum(rank + 1 for rank in active)
    before = sum(rank + 1 for rank in active if rank < hvd.rank())
    total = [sum(before + i + 1 + 100 * rank for rank in active) for i in range(hvd.rank() + 1)]
    assert gradient_of(x, y) == pytest.approx([one / hvd.size() for one in total])


@pytest.mark.parametrize("given", [False, True])
@in_turns
def test_alltoall(active: list[int], given: bool) -> None:
    size, own = hvd.size(), hvd.rank()
    splits = [to + 1 if given else 2 for to in range(size)]
    x = leaf(sum(splits) + (3 if given else 0))  # more than is sent
    y = hvd.alltoall(x, splits, "x")[0] if given else hvd.alltoall(x, None, "x")
    place = active.index(own)
    expected: list[float] = []
    for to in range(size):
        at = place * splits[to] + 100 * to  # of this rank's rows in the result of `to`
        rows = [at + i + 1.0 if to in active else 0.0 for i in range(splits[to])]
        expected += rows
    assert gradient_of(x, y) == expected + [0.0] * (3 if given else 0)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@in_turns
def test_reducescatter(active: list[int], op: int) -> None:
    size = hvd.size()
    rows = 2 * size - 1  # the last rank gets one
    x, other = leaf(rows), leaf(1)
    y, _ = hvd.grouped_reducescatter([x, other], name="x", op=op)
    factor = size if op == hvd.Sum else 1  # as in Horovod
    sent = [
        factor * (i + 1.0 + 100 * to) if to in active else 0.0
        for to in range(size)
        for i in range(1 if to == size - 1 else 2)
    ]
    assert gradient_of(x, y) == sent


@in_turns
def test_reductions_and_broadcast(active: list[int]) -> None:
    size, own = hvd.size(), hvd.rank()
    x = leaf(2)
    mean = [sum(i + 1.0 + 100 * rank for rank in active) / size for i in range(2)]
    assert gradient_of(x, hvd.allreduce(x, name="x")) == pytest.approx(mean)
    x = leaf(2)
    root = active[0]
    got = gradient_of(x, hvd.broadcast(x, root, name="x"))
    assert got == pytest.approx(mean if own == root else [0.0, 0.0])


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
