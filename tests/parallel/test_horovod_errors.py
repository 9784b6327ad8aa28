# SPDX-License-Identifier: Apache-2.0
"""Rows of Horovod's table of errors that concern no argument: what its users would expect, on all
ranks, and then the next collective works. Wrong arguments: test_arguments.py, test_errors.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 3, 4)

ones = torch.ones


@pytest.fixture(autouse=True)
def _a_successful_collective() -> Iterator[None]:
    yield
    total = hvd.size() * (hvd.size() + 1) / 2
    mine = torch.full((3,), hvd.rank() + 1.0)
    assert hvd.allreduce(mine, op=hvd.Sum, name="afterwards").tolist() == [total] * 3
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [total] * 3


def last() -> int:
    return int(hvd.size()) - 1


def calls(x: Tensor, name: str) -> dict[str, Callable[[], Any]]:
    """The collectives on a tensor; alltoall sends its rows to rank 0."""
    return {
        "allreduce": lambda: hvd.allreduce(x, name=name),
        "allgather": lambda: hvd.allgather(x, name=name),
        "broadcast": lambda: hvd.broadcast(x, 0, name=name),
        "alltoall": lambda: hvd.alltoall(x, [len(x)] + [0] * last(), name=name),
        "reducescatter": lambda: hvd.reducescatter(x, name=name),
    }


def test_not_initialised() -> None:
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    for call in calls(ones(4), "too early").values():
        with pytest.raises((hvd.HorovodInternalError, ValueError), match="init"):
            call()
    hvd.init()


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_reducescatter_takes_other_ops_too(op: str) -> None:
    """Horovod refuses these; they have a meaning, and work."""
    x = torch.full((hvd.size(), 2), hvd.rank() + 1.0)
    every = torch.arange(1.0, hvd.size() + 1)
    wanted = {"Min": every.min(), "Max": every.max(), "Product": every.prod()}[op].item()
    result = hvd.reducescatter(x, op=getattr(hvd, op), name=f"rows {op}")
    assert result.tolist() == [[wanted] * 2]


def test_a_scaled_reducescatter_above_the_fusion_threshold_works() -> None:
    """Horovod fails; 33 MiB here."""
    rows = (33 << 20) // 4 // hvd.size()
    x = torch.full((rows * hvd.size(),), hvd.rank() + 1.0)
    result = hvd.reducescatter(x, op=hvd.Sum, name="large", prescale_factor=0.5)
    assert result.shape == (rows,)
    assert (result == hvd.size() * (hvd.size() + 1) / 4).all()


def test_collectives_work_while_a_rank_has_joined() -> None:
    """Horovod fails, or hangs above two ranks; ranks that have joined contribute nothing."""
    if hvd.rank() == last():
        assert hvd.join() >= 0
        return
    active, mine = last(), float(hvd.rank())
    assert hvd.allgather(torch.tensor([mine]), name="j.g").tolist() == list(range(active))
    assert hvd.broadcast(torch.tensor([mine]), 0, name="j.b").tolist() == [0.0]
    total = active * (active - 1) / 2
    rows = hvd.reducescatter(torch.full((hvd.size(), 1), mine), op=hvd.Sum, name="j.r")
    assert rows.tolist() == [[total]]
    sent = torch.full((hvd.size(),), mine)
    assert hvd.alltoall(sent, name="j.a").tolist() == list(range(active))
    hvd.join()


def test_a_stall_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also HorovodInternalError, on the ranks that wait; the runtime stays up."""
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1")
    hvd.init()
    if hvd.rank() != 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"alone.*\b0\b") as caught:
            hvd.allreduce(ones(3), name="not alone")
        assert type(caught.value) is hvd.StallError
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
    monkeypatch.undo()
    MPI.COMM_WORLD.Barrier()
    hvd.init()
