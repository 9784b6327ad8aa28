# SPDX-License-Identifier: Apache-2.0
"""Every row of Horovod's table of errors: what its users would expect, on all ranks, and then the
next collective works. Rows about GPUs, NCCL and deaths are tests/faults' and later ones'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 3, 4)

SOON = 20.0  # seconds until every rank knows; most of it is for a busy machine
ones = torch.ones


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    torch.set_num_threads(1)
    hvd.init()


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


EVERY = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]


def expect_mismatch(call: Callable[[], Any], *says: str) -> None:
    """HorovodInternalError on every rank, at once, that names what differs, where, and the call."""
    start = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    assert type(caught.value) is hvd.MismatchError
    assert time.monotonic() - start < SOON
    others = "rank 0" if last() == 1 else "ranks 0"
    for part in [*says, others, f"rank {last()}", "'differs'"]:
        assert part in str(caught.value)


def test_not_initialised() -> None:
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    for call in calls(ones(4), "too early").values():
        with pytest.raises((hvd.HorovodInternalError, ValueError), match="init"):
            call()
    hvd.init()


@pytest.mark.parametrize("operation", EVERY)
def test_dtype_differs(operation: str) -> None:
    x = ones(hvd.size(), dtype=torch.float64 if hvd.rank() == last() else torch.float32)
    expect_mismatch(calls(x, "differs")[operation], "float32", "float64")


def test_operation_differs() -> None:
    both = calls(ones(4), "differs")
    expect_mismatch(both["allgather" if hvd.rank() == last() else "allreduce"], "allgather")


@pytest.mark.parametrize("operation", ["allreduce", "broadcast", "reducescatter"])
@pytest.mark.parametrize("shape", [(13,), (6, 2), (3, 4, 1)])
def test_shape_differs(operation: str, shape: tuple[int, ...]) -> None:
    x = ones(shape if hvd.rank() == last() else (3, 4))
    expect_mismatch(calls(x, "differs")[operation], "(3, 4)", str(shape))


@pytest.mark.parametrize("operation", ["allgather", "alltoall"])
@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 1)])
def test_shape_differs_beside_the_first_dimension(operation: str, shape: tuple[int, ...]) -> None:
    x = ones(shape if hvd.rank() == last() else (3, 4))
    expect_mismatch(calls(x, "differs")[operation], "shape")


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize("reduce", ["allreduce", "reducescatter"])
def test_factor_differs(reduce: str, factor: str) -> None:
    options: Any = {factor: 0.5 if hvd.rank() == last() else 0.25}
    call = getattr(hvd, reduce)
    expect_mismatch(lambda: call(ones(4), name="differs", **options), "0.5", "0.25")


@pytest.mark.parametrize(
    ("reduce", "other"),
    [
        *(("allreduce", op) for op in ("Average", "Min", "Adasum")),
        *(("reducescatter", op) for op in ("Average", "Min")),
    ],
)
def test_reduce_op_differs(reduce: str, other: str) -> None:
    op = getattr(hvd, other) if hvd.rank() == last() else hvd.Sum
    call = getattr(hvd, reduce)
    expect_mismatch(lambda: call(ones(4), name="differs", op=op), other)


def test_broadcast_root_differs() -> None:
    root = 1 if hvd.rank() == last() else 0
    expect_mismatch(lambda: hvd.broadcast(ones(4), root, name="differs"), "root")


def test_broadcast_root_outside_the_set() -> None:
    process_set = hvd.add_process_set(range(1, hvd.size()))
    if process_set.included():
        with pytest.raises(ValueError, match="0"):
            hvd.broadcast(ones(4), 0, name="root", process_set=process_set)
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


@pytest.mark.parametrize("operation", ["allgather", "alltoall", "reducescatter"])
def test_scalars(operation: str) -> None:
    """ValueError for all three; with Horovod two of them are HorovodInternalError."""
    with pytest.raises(ValueError, match="scalar"):
        getattr(hvd, operation)(torch.tensor(1.0), name="scalar")


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_reducescatter_with_other_ops(op: str) -> None:
    """Horovod refuses these; they have a meaning, and work."""
    x = torch.full((hvd.size(), 2), hvd.rank() + 1.0)
    every = torch.arange(1.0, hvd.size() + 1)
    wanted = {"Min": every.min(), "Max": every.max(), "Product": every.prod()}[op].item()
    result = hvd.reducescatter(x, op=getattr(hvd, op), name=f"rows {op}")
    assert result.tolist() == [[wanted] * 2]


def test_a_scaled_reducescatter_above_the_fusion_threshold() -> None:
    """Horovod fails; 33 MiB here."""
    rows = (33 << 20) // 4 // hvd.size()
    x = torch.full((rows * hvd.size(),), hvd.rank() + 1.0)
    result = hvd.reducescatter(x, op=hvd.Sum, name="large", prescale_factor=0.5)
    assert result.shape == (rows,)
    assert (result == hvd.size() * (hvd.size() + 1) / 4).all()


def test_collectives_while_a_rank_has_joined() -> None:
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


def test_a_name_in_flight() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(ones(3), name="taken_2of2")
        with pytest.raises(ValueError, match="taken"):
            hvd.allreduce_async(ones(3), name="taken_2of2")
        with pytest.raises(ValueError, match="taken"):  # no member of it stays queued
            hvd.grouped_allreduce_async([ones(1), ones(3)], name="taken")
    MPI.COMM_WORLD.Barrier()
    if hvd.rank() != 0:
        # The others learn of the group that rank 0 could not submit, and of nothing else.
        handle = hvd.allreduce_async(ones(3), name="taken_2of2")
    try:
        assert hvd.synchronize(handle).tolist() == [1.0] * 3
    except ValueError as reason:
        assert "taken" in str(reason)  # noqa: PT017


def test_rows_that_do_not_divide() -> None:
    rows = hvd.size() + (hvd.rank() == last())
    with pytest.raises(ValueError, match="multiple of"):
        hvd.alltoall(ones(rows), name="uneven")


def test_outside_a_set_and_unknown_sets() -> None:
    process_set = hvd.add_process_set(range(1, hvd.size()))
    if not process_set.included():
        with pytest.raises(ValueError, match="process set"):
            hvd.allreduce(ones(3), name="outside", process_set=process_set)
    hvd.barrier()
    assert hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(ones(3), name="removed", process_set=process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(ones(3), name="unknown", process_set=hvd.ProcessSet([0]))


@pytest.mark.parametrize("ranks", [[0, 0], [0, 100], [-1]])
def test_process_sets_that_cannot_be(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="rank"):
        hvd.add_process_set(ranks)


def test_a_process_set_twice() -> None:
    process_set = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(hvd.global_process_set)


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_unsupported_dtypes(dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    with pytest.raises(TypeError, match=dtype):
        hvd.allreduce(torch.empty(3, dtype=getattr(torch, dtype)), name="dtype")


def test_in_place_on_what_is_not_contiguous() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(ones(4, 4).t()[1:], name="strided")


def test_average_and_op_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(ones(3), average=True, op=hvd.Sum)
    with pytest.deprecated_call():
        assert hvd.allreduce(ones(3), average=False).tolist() == [hvd.size()] * 3


def test_no_handle() -> None:
    for wrong in (None, 17, "handle"):
        with pytest.raises(ValueError, match="handle"):
            hvd.poll(wrong)
        with pytest.raises(ValueError, match="handle"):
            hvd.synchronize(wrong)


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
