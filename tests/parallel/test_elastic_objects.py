# SPDX-License-Identifier: Apache-2.0
"""Objects that have a state within an elastic state: schedulers, scalers, samplers and the like are
saved, restored and sent by their state_dict(), wherever they are, and stay the same objects."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel

import farandole as fd
import farandole.torch as hvd
from farandole.elastic import ObjectState
from farandole.torch.elastic import ElasticSampler, StateHandler, TorchState

STEPS = 5


class Halving:
    """A callable of LambdaLR, with a state."""

    def __init__(self) -> None:
        self.rate = 0.5

    def __call__(self, epoch: int) -> float:
        return self.rate ** (epoch // 2)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, Halving()),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "CyclicLR of a function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=30),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=8),
    "SequentialLR": lambda o: lrs.SequentialLR(o, _two(o), [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(_two(o)),
}


def _two(optimizer: Any) -> list[Any]:
    return [lrs.ConstantLR(optimizer, 0.1, 3), lrs.ExponentialLR(optimizer, 0.9)]


def made(how: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(fd.rank())
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
    return model, hvd.DistributedOptimizer(optimizer), SCHEDULERS[how](optimizer)


def step(scheduler: Any) -> None:
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def rates(optimizer: Any, scheduler: Any, steps: int = STEPS) -> list[tuple[float, Any]]:
    """Of the optimizer that trains, after each of so many steps of the scheduler."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        step(scheduler)
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("momentum")))
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """One for all ranks."""
    fd.init()
    name = fd.broadcast_object(tempfile.mkdtemp() if fd.rank() == 0 else None)
    yield Path(name) / "call-1"
    fd.barrier()
    if fd.rank() == 0:
        shutil.rmtree(name)


@pytest.mark.parametrize("how", SCHEDULERS)
def test_a_scheduler_drives_the_optimizer_that_trains(how: str, folder: Path) -> None:
    """After a sync, restore() and from the disk; rank 1 comes later, as a new rank does."""
    model, optimizer, scheduler = made(how)
    for _ in range(3 * (fd.rank() == 0)):
        step(scheduler)
    state: Any = TorchState(model, optimizer, scheduler=scheduler, epoch=0)
    state.sync()
    assert state.scheduler is scheduler
    assert scheduler.optimizer is optimizer if hasattr(scheduler, "optimizer") else True
    first = rates(optimizer, scheduler)
    assert fd.allgather_object(first) == [first] * fd.size()
    assert len({rate for rate, _ in first}) > 1 or how == "ConstantLR"
    state.commit()
    second = rates(optimizer, scheduler)
    state.restore()
    assert state.scheduler is scheduler
    assert rates(optimizer, state.scheduler) == second
    state.write(folder)

    model, optimizer, scheduler = made(how)  # as after the loss of all ranks
    state = TorchState(model, optimizer, scheduler=scheduler, epoch=0)
    assert state.read(folder)
    state.sync()
    assert state.scheduler is scheduler
    again = rates(optimizer, scheduler)
    assert again == second
    assert fd.allgather_object(again) == [again] * fd.size()


class Owner:
    """An object of the program without a state_dict(): what it refers to has one."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizer, self.scheduler, self.turns = optimizer, scheduler, fd.rank()
        self.step = scheduler.step


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda optimizer, scheduler: [scheduler, "warm"],
    "dict": lambda optimizer, scheduler: {"a": {1: scheduler}, "b": optimizer},
    "tuple": lambda optimizer, scheduler: ((scheduler,), 3),
    "set": lambda optimizer, scheduler: {scheduler},
    "object": lambda optimizer, scheduler: Owner(optimizer, scheduler),
    "method": lambda optimizer, scheduler: Owner(optimizer, scheduler).step,
    "twice": lambda optimizer, scheduler: [scheduler, [scheduler, optimizer]],
}


def objects_in(value: Any) -> list[int]:
    """The ids of optimizers and schedulers within."""
    if isinstance(value, dict):
        return [number for x in value.values() for number in objects_in(x)]
    if isinstance(value, (list, tuple, set)):
        return [number for x in value for number in objects_in(x)]
    if isinstance(value, Owner):
        return objects_in([value.optimizer, value.scheduler, value.step])
    if callable(getattr(value, "__self__", None)) or hasattr(value, "__self__"):
        return objects_in(value.__self__)
    return [id(value)] if hasattr(value, "state_dict") else []


@pytest.mark.parametrize("kind", [TorchState, ObjectState])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_they_are(place: str, kind: Any) -> None:
    fd.init()
    model, optimizer, scheduler = made("StepLR")
    for _ in range(3 * (fd.rank() == 0)):
        step(scheduler)
    held = PLACES[place](optimizer, scheduler)
    known = objects_in(held)
    assert known
    state: Any = kind(model=model, optimizer=optimizer, held=held)
    for change in (state.sync, state.restore, state.save, state.restore):
        change()
        assert objects_in(state.held) == known
        assert state.optimizer is optimizer
    state.save()
    found = rates(optimizer, scheduler)
    assert found == fd.broadcast_object(found)
    state.restore()
    assert rates(optimizer, scheduler) == found


def test_plain_values_around_them_are_copied() -> None:
    fd.init()
    _, optimizer, scheduler = made("StepLR")
    state: Any = TorchState(optimizer=optimizer, owner=Owner(optimizer, scheduler), seen=[])
    state.sync()
    assert state.owner.turns == 0  # rank 0's
    state.owner.turns, before = 7, state.owner
    state.seen.append(1)
    state.restore()
    assert (state.owner.turns, state.seen) == (0, [])
    assert state.owner is not before
    assert state.owner.scheduler is scheduler


def test_scaler_average_sampler_and_parameters(folder: Path) -> None:
    """Others that have a state, and what an optimizer or a model refers to."""
    torch.manual_seed(fd.rank())
    model = nn.Linear(3, 2)
    average = AveragedModel(model)
    alone = nn.Parameter(torch.full((2,), float(fd.rank())))
    leaf = torch.full((2,), 5.0 + fd.rank(), requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), alone, leaf], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (5 + fd.rank()))
    scaler.scale(torch.ones(1))
    loader = torch.utils.data.DataLoader(range(8), sampler=ElasticSampler(range(8), shuffle=False))
    objects = [model, average, alone, leaf, scaler, loader.sampler]

    def state_of(loader: Any) -> Any:
        return TorchState(
            model, optimizer, average=average, more={"a": alone, "b": [leaf]}, scaler=scaler,
            loader=loader,
        )  # fmt: skip

    state = state_of(loader)

    def values() -> list[Any]:
        seen = [*average.parameters(), *model.parameters(), alone, leaf]
        plain = [x.tolist() for x in seen]
        return [*plain, scaler.get_scale(), objects[-1].processed_num]

    state.sync()
    first = values()
    assert fd.allgather_object(first) == [first] * fd.size()
    assert first[-2] == 32.0
    objects[-1].record_batch(0, 2)
    average.update_parameters(nn.Linear(3, 2))
    alone.data += 1
    leaf.data += 1
    scaler.update(7.0)
    assert values() != first
    state.restore()
    assert values() == first
    assert state.more["a"] is alone
    assert state.more["b"][0] is leaf
    assert state.loader.sampler is objects[-1]
    state = TorchState(model, optimizer, average=average, more={"a": alone, "b": [leaf]})
    state.save()
    state.write(folder)
    alone.data += 1
    average.update_parameters(nn.Linear(3, 2))
    assert state.read(folder)
    assert values() == first or fd.rank() > 0
    state.sync()
    assert values() == first


@pytest.mark.ranks(2, 3)
def test_a_rank_without_the_object_is_told_of_on_all() -> None:
    fd.init()
    _, _, scheduler = made("StepLR")
    state: Any = ObjectState(schedulers=[scheduler] if fd.rank() == 0 else [])
    with pytest.raises(
        ValueError, match=r"rank 1: state, schedulers\.0: rank 0 has a StepLR.*none"
    ):
        state.sync()
    fd.barrier()


def test_two_objects_in_a_set_have_no_order() -> None:
    fd.init()
    schedulers = {made("StepLR")[2], made("StepLR")[2]}
    with pytest.raises(TypeError, match=r"state, both\.member: a set holds several"):
        ObjectState(both=schedulers)


def test_another_object_in_its_place_is_saved_at_once() -> None:
    fd.init()
    model, optimizer, first = made("StepLR")
    state: Any = TorchState(model, optimizer, all=[first], now=first)
    state.sync()
    second = SCHEDULERS["ExponentialLR"](optimizer)
    state.now = second
    found = rates(optimizer, second)
    state.restore()
    assert state.now is second
    assert state.all[0] is first
    assert rates(optimizer, second) == found
    state.model = other = nn.Linear(2, 2)
    kept = other.weight.detach().clone()
    other.weight.data.zero_()
    state.restore()
    assert torch.equal(state.model.weight, kept)


def test_a_handler_of_the_user_comes_first() -> None:
    fd.init()

    class Mine(StateHandler[Any]):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = fd.broadcast_object(self.value.count, 0)
            self.save()

    class Counter:
        def __init__(self) -> None:
            self.count = fd.rank() + 3

    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(Counter, Mine), *before])
    try:
        counter = Counter()
        state: Any = ObjectState(held=[counter])
        state.sync()
        assert counter.count == 3
        counter.count = 9
        state.restore()
        assert counter.count == 3
        assert state.held[0] is counter
    finally:
        hvd.elastic.set_handler_registry(before)
