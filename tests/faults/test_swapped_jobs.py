# SPDX-License-Identifier: Apache-2.0
"""Somebody between the ranks of two jobs of one user and their stores, who leads rank 1 of each to
the other job's store. No rank may meet a rank of the other job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import Store, TCPStore

from farandole.c10d.meeting import StoreBootstrap
from farandole.errors import LibraryError

PATIENCE = 60.0  # seconds


class Led(Store):  # type: ignore[misc]
    """What rank 1 takes for its job's store: its address is right, and another store answers."""

    def __init__(self, own: TCPStore, other: TCPStore) -> None:
        super().__init__()
        self.port, self.host = own.port, own.host
        self._other = other
        self.calls = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        self._other.set(key, value)

    def get(self, key: str) -> Any:
        self.calls += 1
        return self._other.get(key)

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return bool(self._other.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._other.wait(keys, timeout)


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("secret", ["", "a secret of both jobs, which one user has"])
@pytest.mark.parametrize("swapped", [False, True])
def test_rank_1_of_two_jobs_of_one_user(
    ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, swapped: bool, secret: str
) -> None:
    monkeypatch.setenv("FARANDOLE_JOB_SECRET", secret)
    monkeypatch.setenv("FARANDOLE_JOB_SECRET_FILE", "none")
    stores = [TCPStore("localhost", 0, None, True, wait_for_workers=False) for _ in range(2)]
    led = [
        Led(own, other) for own, other in zip(stores, stores[:: -1 if swapped else 1], strict=True)
    ]
    jobs = [
        [ranks.submit(StoreBootstrap, store, rank, 2, PATIENCE) for rank, store in enumerate(both)]
        for both in zip(stores, led, strict=True)
    ]
    ends = [outcome(each) for job in jobs for each in job]
    assert all(each.calls for each in led), "the stranger has led rank 1 of each job"
    if not swapped:
        assert ends == ["met"] * 4
        return
    assert "met" not in ends, f"two jobs were mixed: {ends}"
    assert all("not prove to each other that they are of one job" in end for end in ends), ends


def outcome(job: Future[StoreBootstrap]) -> str:
    """How a rank's meeting ended."""
    try:
        job.result(PATIENCE)
    except LibraryError as error:
        return str(error)
    return "met"
