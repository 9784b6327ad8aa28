# SPDX-License-Identifier: Apache-2.0
"""Meetings in a store of c10d, whose ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import pytest
from torch._C._distributed_c10d import HashStore, Store

from farandole.c10d import meeting
from farandole.c10d.meeting import StoreBootstrap

__all__ = ["LONG", "SECRET", "SHORT", "exchange", "hosts", "met", "ranks", "start", "store"]

LONG, SHORT = 60.0, 0.3  # seconds
SECRET = "a secret of the job's own"


def start(ranks: ThreadPoolExecutor, store: Store, size: int) -> list[Future[StoreBootstrap]]:
    """All ranks of a meeting come."""
    return [ranks.submit(StoreBootstrap, store, r, size, LONG) for r in range(size)]


def met(jobs: list[Future[StoreBootstrap]]) -> list[StoreBootstrap]:
    """The ranks, when they have met."""
    return [job.result(LONG) for job in jobs]


def exchange(ranks: ThreadPoolExecutor, jobs: list[StoreBootstrap]) -> None:
    """Every rank receives what every rank of this very meeting has sent."""
    for number in range(2):
        told = [f"{number} of {job.rank}".encode() for job in jobs]
        calls = [ranks.submit(job.allgather, data) for job, data in zip(jobs, told, strict=True)]
        assert all(call.result(LONG) == told for call in calls)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes itself for one on a host of its own, in each meeting another one."""
    numbers = count()
    monkeypatch.setattr(meeting, "_host", lambda: f"host {next(numbers)}")
