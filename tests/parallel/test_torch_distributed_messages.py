# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend `farandole`: sends and receives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import farandole.torch as hvd
from harness.c10d import backend, since  # noqa: F401 (a fixture of all tests)

pytestmark = [pytest.mark.ranks(2, 3, 4)]


def data(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) * (rank + 1)


def test_a_ring() -> None:
    """Also into a tensor whose elements don't lie in order."""
    n, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % n, (rank - 1) % n
    for shape in ((3,), (300, 1000)):
        x, y = data(rank, shape).requires_grad_(), torch.zeros(shape[::-1]).t()
        ops = [dist.P2POp(dist.isend, x, to, tag=4), dist.P2POp(dist.irecv, y, source, tag=4)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(y, data(source, shape))


def test_from_anyone() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(1, n)))
    if rank == 0:
        y = torch.zeros(2)
        found = {dist.recv(y): y.tolist() for _ in range(n - 1)}
        assert found == {r: [r, 2.0 * r] for r in range(1, n)}
    else:
        dist.send(torch.tensor([rank, 2.0 * rank]), 0)
    if n > 2 and rank == 1:
        dist.isend(torch.tensor([7.0]), 2, group).get_future().wait()
    elif rank == 2:
        y = torch.zeros(1)
        assert dist.recv(y, group=group) == 1
        assert y.item() == 7.0


@since(2, 4)
def test_objects() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send_object_list([{"from": rank}], 1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, 0)
        assert received == [{"from": 0}]


def test_futures_do_not_wait_for_each_other() -> None:
    """Nor for a collective, which the other rank begins last."""
    rank = dist.get_rank()
    y = torch.zeros(2, 2)
    if rank == 0:
        works = [dist.irecv(y[i], 1, tag=i) for i in (0, 1)]
        futures = [work.get_future() for work in works]
        futures[1].wait()
        assert y[1].tolist() == [5.0, 6.0]
        dist.send(torch.ones(1), 1, tag=9)
        futures[0].wait()
        assert y[0].tolist() == [3.0, 4.0]
    elif rank == 1:
        dist.send(torch.tensor([5.0, 6.0]), 0, tag=1)
        dist.recv(torch.zeros(1), 0, tag=9)
        dist.send(torch.tensor([3.0, 4.0]), 0, tag=0)
    dist.barrier()


def test_ends_that_do_not_fit() -> None:
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(hvd.MismatchError, match=r"3 elements.*4 elements"):
            dist.send(torch.ones(3), 1)
    elif rank == 1:
        with pytest.raises(hvd.MismatchError, match=r"3 elements.*4 elements"):
            dist.recv(torch.ones(4), 0)


def test_to_oneself_and_from_nobody() -> None:
    with pytest.raises(ValueError, match=r"itself|own"):
        dist.group.WORLD.send([torch.ones(1)], dist.get_rank(), 0)
    with pytest.raises(ValueError, match="the process set has ranks 0 to"):
        dist.group.WORLD.recv([torch.ones(1)], dist.get_world_size(), 0)
