# SPDX-License-Identifier: Apache-2.0
"""Memory in flight lives until the core has done with it, whatever happens in Python."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import farandole as fd
import farandole.torch as hvd
from farandole.calls import leases
from harness.in_flight import SIZE, canaries, everyones, finish, late, mine

pytestmark = pytest.mark.ranks(2, 4)

CALLS: dict[str, Callable[[Tensor, str], Any]] = {
    "torch": lambda x, name: hvd.allreduce_async(x, None, name, hvd.Sum),
    "torch in place": lambda x, name: hvd.allreduce_async_(x, op=hvd.Sum, name=name),
    "numpy": lambda x, name: fd.allreduce_async(x.numpy(), op=fd.Sum, name=name),
    "numpy in place": lambda x, name: fd.allreduce_async_(x.numpy(), op=fd.Sum, name=name),
    "broadcast": lambda x, name: hvd.broadcast_async(x, fd.size() - 1, name),
    "allgather": lambda x, name: hvd.allgather_async(x, name),
    "group": lambda x, name: hvd.grouped_allreduce_async([x, x + 1], None, name, hvd.Sum),
}


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_dropped_handle(call: str, calls_before: int) -> None:
    name = f"dropped {call} {calls_before}"
    for _ in range(calls_before):
        CALLS[call](torch.full((SIZE,), mine()), name).wait()
    if not late():
        CALLS[call](torch.full((SIZE,), mine()), name)
    with canaries():
        finish(lambda: CALLS[call](torch.full((SIZE,), mine()), name).wait())


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_wait_that_times_out(calls_before: int) -> None:
    def run(timeout: float | None = None) -> Any:
        x = torch.full((SIZE,), mine())
        return fd.allreduce(x, op=fd.Sum, name=f"times out {calls_before}", timeout=timeout)

    for _ in range(calls_before):
        run(60.0)
    if not late():
        with pytest.raises(fd.StallError):
            run(0.01)
    with canaries():
        finish(run)


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("in_place", [True, False])
def test_data_replaced_in_flight(calls_before: int, in_place: bool) -> None:
    name = f"data {calls_before} {in_place}"

    def start(x: Tensor) -> Any:
        if in_place:
            return hvd.allreduce_async_(x, op=hvd.Sum, name=name)
        return hvd.allreduce_async(x, op=hvd.Sum, name=name)

    for _ in range(calls_before):
        start(torch.full((SIZE,), mine())).wait()
    handle, x = None, torch.full((SIZE,), mine())
    if not late():
        handle = start(x)
        x.data = torch.zeros(3)
    with canaries():
        finish(lambda: start(x).wait())
        if handle is not None:
            result = handle.wait()
            assert result.tolist() == ([0.0] * 3 if in_place else [everyones()] * SIZE)


def test_joined_ranks_make_no_difference() -> None:
    def run() -> Any:
        return hvd.allreduce_async(torch.full((SIZE,), mine()), op=hvd.Sum, name="beside join")

    run().wait()
    if late():
        with canaries():
            hvd.join()
    else:
        run()
        with canaries():
            hvd.join()


def test_a_second_wait_after_the_result_could_not_be_made() -> None:
    def run(name: str) -> Any:
        return fd.allgather_async(np.full(SIZE, mine()), name=name)

    def fail(_result: object) -> None:
        raise MemoryError("no memory for the result")

    handle = run("cannot be made").map(fail)
    for _ in range(3):
        with pytest.raises(MemoryError, match="no memory for the result"):
            handle.wait()
    assert run("can be made").wait().sum() == SIZE * everyones()


def test_freed_storage_is_an_error_on_all_ranks() -> None:
    for calls_before in range(3):
        x = torch.full((SIZE,), mine())
        if calls_before:
            hvd.allreduce(x, name="freed", op=hvd.Sum)
        if late():
            x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=rf"ranks? [\d, ]*\b{fd.size() - 1}\b|freed|storage"):
            hvd.allreduce(x, name="freed", op=hvd.Sum)


def test_nothing_stays_lent() -> None:
    for _ in range(50):
        for name, call in CALLS.items():
            call(torch.full((SIZE,), mine()), f"lent {name}")
        for name in CALLS:
            if name != "group":
                hvd.allreduce(torch.full((SIZE,), mine()), name=f"waited {name}", op=hvd.Sum)
        fd.barrier()
    gc.collect()
    for _ in range(8):
        fd.barrier()
        leases.sweep(10_000)
    assert len(leases._held) == len(leases._dropped) == 0
