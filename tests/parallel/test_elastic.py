# SPDX-License-Identifier: Apache-2.0
"""Elastic training in the world that mpirun started: commit, failure, restore, go on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole import commits
from farandole.elastic import ObjectState
from farandole.elastic import run as run_neutral
from farandole.errors import HostsUpdatedInterrupt
from farandole.torch import elastic

STEPS = 6


def stall() -> None:
    """A real one on every rank: each waits for a tensor that it alone submits."""
    fd.allreduce(np.ones(1), name=f"of rank {fd.rank()} alone", timeout=0.05)
    raise AssertionError("a world of one does not stall")


def fail() -> None:
    if fd.size() == 1:
        raise fd.StallError("nobody else is here to wait for")
    stall()


class Trainer:
    """A little training; `events` by step number happen once, after that step's backward pass."""

    def __init__(self, events: dict[int, Any] | None = None, op: int = hvd.Average) -> None:
        torch.manual_seed(fd.rank())  # other values on every rank: sync() must make them equal
        self.model = nn.Linear(3, 2)
        plain = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(plain, op=op)
        self.events = dict(events or {})
        self.state = elastic.TorchState(self.model, self.optimizer, step=0, log=[])
        self.steps_done = 0

    def __call__(self) -> Any:
        return elastic.run(Trainer.loop)(self.state, self)

    @staticmethod
    def loop(state: Any, self: Trainer) -> str:
        while state.step < STEPS:
            x = torch.randn(
                8, 3, generator=torch.Generator().manual_seed(state.step * 7 + fd.rank())
            )
            self.optimizer.zero_grad()
            self.model(x).pow(2).sum().backward()
            event = self.events.pop(state.step, None)
            if event is not None:
                event()
            self.optimizer.step()
            state.step += 1
            state.log.append(state.step)
            self.steps_done += 1
            if state.step % 2 == 0:
                state.commit()
        return "done"

    def parameters(self) -> list[float]:
        return [x for p in self.model.parameters() for x in p.flatten().tolist()]


@pytest.fixture(scope="module")
def undisturbed() -> Trainer:
    fd.init()
    trainer = Trainer()
    assert trainer() == "done"
    return trainer


def assert_like(trainer: Trainer, undisturbed: Trainer) -> None:
    assert trainer.parameters() == undisturbed.parameters()
    assert fd.allgather_object(trainer.parameters()) == [trainer.parameters()] * fd.size()
    assert trainer.state.log == list(range(1, STEPS + 1))


def test_without_failures(undisturbed: Trainer) -> None:
    assert_like(undisturbed, undisturbed)
    assert undisturbed.steps_done == STEPS


@pytest.mark.parametrize("step", [0, 2, 3, 5])
def test_a_stall_goes_back_to_the_last_commit(undisturbed: Trainer, step: int) -> None:
    trainer = Trainer({step: fail})
    resets: list[int] = []
    trainer.state.register_reset_callbacks([lambda: resets.append(fd.size())])
    assert trainer() == "done"
    assert resets == [fd.size()]
    assert trainer.steps_done == STEPS + step % 2
    assert_like(trainer, undisturbed)


@pytest.mark.ranks(2, 3, 4)
def test_a_stall_of_one_rank_takes_the_others_along(undisturbed: Trainer) -> None:
    def one_fails() -> None:
        if fd.rank() == 0:
            stall()

    trainer = Trainer({3: one_fails})
    assert trainer() == "done"
    assert_like(trainer, undisturbed)


def mismatch() -> None:
    fd.allreduce(np.ones(3 + fd.rank()), name="shapes")
    raise fd.MismatchError("alone there is nobody to disagree with")


def oops() -> None:
    raise KeyError("oops")


@pytest.mark.parametrize(("event", "error"), [(mismatch, fd.MismatchError), (oops, KeyError)])
def test_a_mistake_is_not_tried_again(event: Any, error: type[Exception]) -> None:
    trainer = Trainer({2: event})
    with pytest.raises(error):
        trainer()
    trainer.optimizer.zero_grad()
    assert trainer.steps_done == 2


@pytest.mark.parametrize(("result", "skip"), [(1, True), (2, False), (3, False)])
def test_a_host_update_is_seen_by_all(undisturbed: Trainer, result: int, skip: bool) -> None:
    trainer = Trainer()

    def news() -> None:
        if fd.rank() == fd.size() - 1:
            trainer.state.on_hosts_updated(1.0, result)

    seen: list[bool] = []
    check = trainer.state.check_host_updates

    def look() -> None:
        try:
            check()
        except HostsUpdatedInterrupt as interrupt:
            seen.append(interrupt.skip_sync)
            raise

    trainer.state.check_host_updates = look
    trainer.events = {1: news}
    assert trainer() == "done"
    assert seen == [skip]
    assert trainer.steps_done == STEPS  # nothing was restored: nothing is done twice
    assert_like(trainer, undisturbed)


def test_if_starting_anew_fails_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_for_good() -> None:
        monkeypatch.setenv("FARANDOLE_STALL_WARN", "soon")
        fail()

    trainer = Trainer({1: fail_for_good})
    with pytest.raises(ValueError, match="FARANDOLE_STALL_WARN"):
        trainer()
    assert not fd.is_initialized()
    monkeypatch.undo()
    MPI.COMM_WORLD.Barrier()
    fd.init()


def test_neutral_state() -> None:
    state: Any = ObjectState(count=0, values={"rank": fd.rank()})
    attempts = []

    @run_neutral
    def train(state: Any, gain: int) -> int:
        attempts.append(state.count)
        assert state.values == {"rank": 0}  # rank 0's, everywhere
        state.count += gain
        state.commit()
        state.count += 1000  # not committed
        if len(attempts) == 1:
            fail()
        return int(state.count)

    assert train(state, gain=5) == 1010
    assert attempts == [0, 5]


def test_a_disk_that_fails_ends_nothing(
    undisturbed: Trainer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder is away during two commits: training goes on, and the last commit is there."""
    parent = Path(fd.broadcast_object(tempfile.mkdtemp() if fd.rank() == 0 else None))
    folder, away = parent / "kept", parent / "away"
    monkeypatch.setattr(commits, "_PATIENCE", 0.2)
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_DIR", str(folder))
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_SECONDS", "0")
    fd.shutdown()  # settings are read when the core starts
    fd.init()

    def move(old: Path, new: Path) -> Any:
        return lambda: old.rename(new) if fd.rank() == 0 else None

    trainer = Trainer({2: move(folder, away), 5: move(away, folder)})
    assert trainer() == "done"
    assert_like(trainer, undisturbed)
    assert trainer.steps_done == STEPS
    if fd.rank() == 0:
        told = [line for line in capfd.readouterr().err.splitlines() if "farandole: commit" in line]
        assert len(told) == 2, told
        assert "commit 2 is not saved on the disk yet: " in told[0]
        assert "commit 3 is saved: the disk works again" in told[1]
        assert commits.newest_commit(folder) == (trainer.state.world, 3)
        shutil.rmtree(parent)
    monkeypatch.undo()
    fd.shutdown()
    fd.init()
