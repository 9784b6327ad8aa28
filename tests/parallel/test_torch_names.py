# SPDX-License-Identifier: Apache-2.0
"""Names of optimizers' calls in a later world: equal on all ranks, whatever each did before."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole.calls import requests
from farandole.torch.elastic import TorchState

pytestmark = pytest.mark.ranks(2, 3)


class Tower:
    """All towers are equal, and their parameters have no names."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 1.0)
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0)
        )

    def loss(self, scale: float) -> torch.Tensor:
        return self.model(torch.full((1, 1), scale)).sum()

    @property
    def gradient(self) -> float:
        assert self.model.weight.grad is not None
        return float(self.model.weight.grad)


def anew() -> None:
    """The next world, in which rank 1 is a replacement: like a new process, it was in none."""
    replaced = fd.rank() == 1
    fd.shutdown()
    if replaced:
        requests.enter(0, [0])
    fd.init()


def scales() -> tuple[float, float]:
    """Their means over the ranks are 2 and 20."""
    off = fd.rank() - (fd.size() - 1) / 2
    return 2.0 + off, 20.0 + 10 * off


ORDERS = ["first", "last", "together", "in step"]


def train(a: Tower, b: Tower, order: str) -> None:
    """One step in which `b` comes before `a`, or both in one pass."""
    for tower in (a, b):
        tower.optimizer.zero_grad()
    low, high = scales()
    if order == "together":
        # The gradients of the towers arrive in another order on each rank.
        losses = [a.loss(low), b.loss(high)]
        sum(losses if fd.rank() % 2 else losses[::-1]).backward()  # type: ignore[union-attr]
    elif order == "in step":
        for tower, scale in ((a, low), (b, high)):
            with tower.optimizer.no_sync():
                tower.loss(scale).backward()
        b.optimizer.step()
        a.optimizer.step()
    else:
        pairs = [(a, low), (b, high)]
        for tower, scale in pairs if order == "first" else pairs[::-1]:
            tower.loss(scale).backward()
    for tower in (a, b):
        tower.optimizer.step()


def check(a: Tower, b: Tower, order: str) -> None:
    for _ in range(2):
        train(a, b, order)
        assert (a.gradient, b.gradient) == (2.0, 20.0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_replacement_makes_its_towers_in_the_new_world(order: str) -> None:
    fd.init()
    a, b = Tower(), Tower()
    check(a, b, order)
    anew()
    if fd.rank() == 1:
        a, b = Tower(), Tower()
    check(a, b, order)
    anew()
    check(a, b, order)


@pytest.mark.parametrize("order", ORDERS)
def test_survivors_make_new_towers_too_and_keep_old_ones(order: str) -> None:
    fd.init()
    kept = []
    for _ in range(3):
        a, b = Tower(), Tower()
        check(a, b, order)
        kept += [a, b] if fd.rank() != 1 else []
        gc.collect()
        anew()
    a, b = Tower(), Tower()
    check(a, b, order)
    assert len(kept) in (0, 6)


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_rank_did_before_does_not_count(order: str) -> None:
    """It has used others, made some that it never used, and one tower earlier than others."""
    fd.init()
    unused = [Tower() for _ in range(fd.rank() + 1)]
    a = Tower()
    anew()
    more = [Tower() for _ in range(2 - fd.rank() % 2)]
    b = Tower()
    check(a, b, order)
    assert unused
    assert more


@pytest.mark.parametrize("order", ORDERS)
def test_a_state_names_them_when_it_is_synchronised(order: str) -> None:
    """So a pass may reach some of them only."""
    fd.init()
    a, b = Tower(), Tower()
    check(a, b, order)
    anew()
    if fd.rank() == 1:
        b, a = Tower(), Tower()
    state: Any = TorchState(a.model, a.optimizer, other=[b.model, b.optimizer])
    state.sync()
    check(a, b, order)
    low, high = scales()
    for tower in (a, b):
        tower.optimizer.zero_grad()
    if fd.rank() == 1:  # without the other tower in this pass
        b.loss(high).backward()
        a.optimizer.synchronize()
    else:
        (a.loss(low) + b.loss(high)).backward()
    assert b.gradient == 20.0


def test_passes_that_reach_different_towers_are_no_mixture() -> None:
    """The first ones in a later world: all ranks get an error."""
    fd.init()
    a, b = Tower(), Tower()
    check(a, b, "first")
    anew()
    low, high = scales()
    loss = b.loss(high) if fd.rank() == 1 else a.loss(low) + b.loss(high)
    with pytest.raises(fd.MismatchError, match=r"named is 1 on one rank, 2 on another.*remedy"):
        loss.backward()
    for tower in (a, b):
        tower.optimizer.zero_grad()
    fd.barrier()


def test_threads_of_a_world_that_only_survivors_form() -> None:
    """There names follow the order in which optimizers are made, whichever thread is first."""
    fd.init()
    fd.shutdown()
    fd.init()
    a, b = Tower(), Tower()
    low, high = scales()
    jobs = [(a, low), (b, high)]
    first = threading.Barrier(2)

    def run(number: int) -> None:
        tower, scale = jobs[number]
        first.wait()
        tower.loss(scale).backward()

    with ThreadPoolExecutor(2) as threads:
        order = (0, 1) if fd.rank() % 2 else (1, 0)
        list(threads.map(run, order))
    assert (a.gradient, b.gradient) == (2.0, 20.0)


def test_handles_of_an_earlier_world_are_lost() -> None:
    fd.init()
    handle = fd.allreduce_async(torch.ones(3).numpy(), name="before")
    fd.shutdown()
    assert handle.poll()
    with pytest.raises(fd.ShutdownError, match="last shutdown"):
        handle.wait()
    fd.init()
    handle = fd.allreduce_async(torch.ones(3).numpy(), name="of one")
    other = fd.allreduce_async(torch.ones(3).numpy(), name="of another")
    handle.wait()
    anew()
    with pytest.raises(fd.ShutdownError, match="last shutdown"):
        other.wait()
    assert handle.wait().tolist() == [1, 1, 1]
