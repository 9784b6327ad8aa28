# SPDX-License-Identifier: Apache-2.0
"""Small calls that ranks of one host complete among themselves, and every way out of that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from farandole.arrays.kinds import kind_of
from farandole.calls.handles import wait_until
from farandole.calls.leases import end, lend
from farandole.calls.requests import Call, Op, PreparedCall, count_unnamed
from farandole.topology import local_size
from harness.cells import count_in_cells
from harness.ranks import mine, total

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

TURNS = 12


def test_they_need_no_coordinator() -> None:
    """After the first calls, which all ranks agree on."""
    if local_size() < fd.size() or fd.size() == 1:
        pytest.skip("needs several ranks, all on one host")
    x = np.zeros(3)
    buffer = kind_of(x).describe(x)
    call = PreparedCall(Call(Op.ALLREDUCE, "small.met", reduce_op=fd.Sum), buffer)
    for turn in range(TURNS):
        x[:] = mine(turn)
        number = lend(call.call, x.ctypes.data, x.ctypes.data, x)
        if number:
            assert wait_until((number,), None) == 0
            end((number,))
        assert (x == total(turn)).all()
    assert count_in_cells(TURNS) > 0


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "allreduce_": lambda x, _: fd.allreduce_(x, op=fd.Sum, name="small.in_place"),
    "allreduce": lambda x, _: fd.allreduce(x, op=fd.Sum, name="small.new"),
    "unnamed": lambda x, _: fd.allreduce(x, op=fd.Sum),
    "torch": lambda x, _: hvd.allreduce(torch.from_numpy(x), op=hvd.Sum).numpy(),
    "name by turn": lambda x, turn: fd.allreduce(x, op=fd.Sum, name=f"small.{turn % 3}"),
    "async on one rank": lambda x, turn: (
        fd.allreduce_async(x, op=fd.Sum, name="small.async").wait()
        if turn % fd.size() == fd.rank()
        else fd.allreduce(x, op=fd.Sum, name="small.async")
    ),
}


@pytest.mark.parametrize("elements", [1, 100, 3000, 20000, 131072, 131073])
@pytest.mark.parametrize("form", CALLS)
def test_results(form: str, elements: int) -> None:
    for turn in range(TURNS):
        x = np.full(elements, mine(turn))
        x[-1] += 1
        y = CALLS[form](x, turn)
        assert (y[:-1] == total(turn)).all()
        assert y[-1] == total(turn) + fd.size()


OPS = [fd.Average, fd.Min, fd.Max]
TERMS = [
    *((dtype, op) for dtype in ("float16", "bfloat16", "int32", "uint8") for op in OPS),
    ("complex64", fd.Average),
    ("bool", fd.Min),
]


@pytest.mark.parametrize(("dtype", "op"), TERMS)
def test_the_bits_are_those_of_the_coordinator(dtype: str, op: int) -> None:
    generator = torch.Generator().manual_seed(fd.rank())
    for turn in range(TURNS):
        x = (torch.rand(50, generator=generator) * 100).to(getattr(torch, dtype))
        factors: dict[str, Any] = {} if dtype == "bool" else {"prescale_factor": 0.5}
        there = hvd.allreduce_async(x, op=op, name=f"small.there {turn}", **factors).wait()
        here = hvd.allreduce(x, op=op, name="small.here", **factors)
        assert torch.equal(here, there)


@pytest.mark.parametrize("name", [None, "small.broadcast"])
@pytest.mark.parametrize("root", [0, -1])
def test_broadcasts_and_barriers(root: int, name: str | None) -> None:
    root %= fd.size()
    for turn in range(TURNS):
        x = np.full(5, mine(turn))
        wanted = [1.0 + root + 10 * turn] * 5
        assert hvd.broadcast_async(torch.from_numpy(x), root, name).wait().tolist() == wanted
        assert fd.broadcast(x, root, name=name).tolist() == wanted
        assert (x == mine(turn)).all()
        fd.broadcast_(x, root, name=name)
        assert x.tolist() == wanted
        fd.barrier()


def test_beside_calls_under_way() -> None:
    for turn in range(TURNS):
        large = np.full(300000, mine(turn))
        handle = fd.allreduce_async_(large, op=fd.Sum, name="small.large")
        assert fd.allreduce(np.array([mine(turn)]), op=fd.Sum, name="small.beside") == total(turn)
        assert (handle.wait() == total(turn)).all()


def test_a_form_that_changes() -> None:
    for turn in range(TURNS):
        x = np.full(1 + turn % 3, mine(turn), [np.float32, np.float64][turn % 2])
        assert (fd.allreduce(x, op=fd.Sum, name="small.form") == total(turn)).all()


def test_sets_that_share_a_name() -> None:
    added = [fd.add_process_set(list(range(first, fd.size()))) for first in range(1, fd.size())]
    sets = [fd.global_process_set, *added]
    for turn in range(TURNS):
        for first, process_set in enumerate(sets):
            if fd.rank() < first:
                continue
            y = fd.allreduce(
                np.array([mine(turn)]), op=fd.Sum, name="small.set", process_set=process_set
            )
            assert y == sum(1.0 + rank + 10 * turn for rank in range(first, fd.size()))
    for process_set in added:
        fd.remove_process_set(process_set)


def test_threads() -> None:
    wrong: list[Any] = []

    def calls(thread: int) -> None:
        for turn in range(TURNS):
            y = fd.allreduce(np.array([mine(turn)]), op=fd.Sum, name=f"small.thread {thread}")
            if y != total(turn):
                wrong.append((thread, turn, y))

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_mismatch_and_a_refusal() -> None:
    """The next calls of the name are right again."""
    if fd.size() == 1:
        pytest.skip("needs ranks that disagree")
    for turn in range(5):
        for _ in range(3):
            y = fd.allreduce(np.array([mine(turn)]), op=fd.Sum, name="small.mismatch")
            assert y == total(turn)
        with pytest.raises(fd.MismatchError):
            fd.allreduce(np.ones(1 + fd.rank()), op=fd.Sum, name="small.mismatch")
        bad: Any = "no array" if fd.rank() == turn % fd.size() else np.ones(1)
        with pytest.raises((TypeError, ValueError)):
            fd.allreduce(bad, op=fd.Sum, name="small.mismatch")


def test_a_rank_that_joins() -> None:
    for _ in range(3):
        for turn in range(fd.rank() * 3):
            y = fd.allreduce(np.array([1.0]), op=fd.Sum, name="small.join")
            assert y == sum(rank * 3 > turn for rank in range(fd.size()))
        fd.join()
        for turn in range(3):
            assert fd.allreduce(np.array([mine(turn)]), op=fd.Sum) == total(turn)


def test_a_late_rank() -> None:
    """It comes when the others have turned to the coordinator, whom they ask whom they wait for."""
    if fd.size() == 1:
        pytest.skip("needs a rank that is late")
    for turn in range(3):
        fd.allreduce(np.array([mine(turn)]), op=fd.Sum, name="small.late")
    if fd.rank() == 0:
        for peer in range(1, fd.size()):
            fd.recv(np.zeros(1), source=peer, tag=7)
        fd.allreduce(np.array([mine(0)]), op=fd.Sum, name="small.late")
    else:
        with pytest.raises(fd.StallError, match=r"small\.late"):
            fd.allreduce(np.array([mine(0)]), op=fd.Sum, name="small.late", timeout=0.01)
        fd.send(np.zeros(1), destination=0, tag=7)


def test_unnamed_calls_that_the_coordinator_does_not_know_leave_no_gap() -> None:
    """It would keep a place for each of them, as its own count of unnamed calls jumps."""
    before = count_unnamed(0)
    for turn in range(TURNS):
        assert fd.allreduce(np.array([mine(turn)]), op=fd.Sum) == total(turn)
    assert count_unnamed(0) == before + TURNS
    x = np.array([mine(1)])
    call = PreparedCall(Call(Op.ALLREDUCE, reduce_op=fd.Sum), kind_of(x).describe(x))
    number = lend(call.start, x.ctypes.data, x.ctypes.data, x)
    assert wait_until((number,), None) == 0
    end((number,))
    assert x == total(1)


def test_join_beside_a_thread_that_calls() -> None:
    """The call of the thread came first; the joined rank has made it."""
    if fd.size() == 1:
        pytest.skip("needs a rank that is late")
    for turn in range(5):
        fd.allreduce(np.array([mine(turn)]), op=fd.Sum, name="small.beside_join")
    got: list[Any] = []

    def calls() -> None:
        got.append(fd.allreduce(np.array([mine(0)]), op=fd.Sum, name="small.beside_join"))

    if fd.rank() == 0:
        before = fd.metrics()["tensors_submitted"]
        thread = threading.Thread(target=calls)
        thread.start()
        while fd.metrics()["tensors_submitted"] == before:
            pass
        for peer in range(1, fd.size()):
            fd.send(np.zeros(1), destination=peer, tag=8)
        fd.join()
        thread.join()
    else:
        fd.recv(np.zeros(1), source=0, tag=8)
        calls()
        fd.join()
    assert got[0] == total(0)
