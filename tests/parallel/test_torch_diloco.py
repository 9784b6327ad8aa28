# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and Local SGD: beside a process that trains all ranks' models by itself, and strangers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.checkpoints import bits, folder
from harness.toys import Mixed, assert_same, batch, loss_of, network

__all__ = ["folder"]
together = pytest.mark.ranks(2, 3, 4)
Outer = Callable[[Any], torch.optim.Optimizer] | None
OUTERS: dict[str, Outer] = {
    "average": None,
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
}
EVERY = 3


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    ps = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(ps, lr=0.05, momentum=0.9)


class Training:
    """One rank's: its model, inner optimizer and DiLoCo."""

    def __init__(self, outer: Outer = OUTERS["nesterov"], **options: Any) -> None:
        self.model = network()
        self.inner = inner_of(self.model)
        self.outer = None if outer is None else outer(self.model.parameters())
        self.diloco = hvd.DiLoCo(
            self.model.named_parameters(), self.outer, **{"every": EVERY, **options}
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "inner": self.inner, "diloco": self.diloco}

    def train(self, steps: range) -> list[int]:
        """The steps that were outer ones, after which all ranks are equal."""
        found = []
        for step in steps:
            one_step(self.model, self.inner, hvd.rank(), step)
            if self.diloco.step():
                found.append(step)
        return found

    def bits(self) -> Any:
        parts = [self.model.state_dict(), self.inner.state_dict(), self.diloco.state_dict()]
        return bits(parts)


def one_step(model: nn.Module, inner: torch.optim.Optimizer, rank: int, step: int) -> None:
    inner.zero_grad()
    loss_of(model, batch(rank, step)).backward()
    inner.step()


def reference(outer: Outer, steps: int, ranks: int) -> nn.Module:
    """The common parameters after `steps`, of so many models in this process."""
    common = network()
    optimizer = None if outer is None else outer(common.parameters())
    models = [network() for _ in range(ranks)]
    inners = [inner_of(model) for model in models]
    for step in range(steps):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            one_step(model, inner, rank, step)
        if (step + 1) % EVERY:
            continue
        with torch.no_grad():
            grads = [
                torch.stack([x - p for p in ps]).mean(0)
                for x, *ps in zip(
                    common.parameters(), *(m.parameters() for m in models), strict=True
                )
            ]
            for x, grad in zip(common.parameters(), grads, strict=True):
                x.grad = grad
                if optimizer is None:
                    x.sub_(grad)
            if optimizer is not None:
                optimizer.step()
            for model in models:
                model.load_state_dict(common.state_dict())
    return common


def everywhere(model: nn.Module) -> Tensor:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return hvd.allgather(flat.unsqueeze(0))


def same_on_all(model: nn.Module) -> bool:
    rows = everywhere(model)
    return bool((rows.view(torch.int64) == rows[0].view(torch.int64)).all())


# ---- what it computes


@pytest.mark.parametrize("outer", OUTERS)
def test_as_one_process_that_trains_all(outer: str) -> None:
    training = Training(OUTERS[outer])
    for epoch in range(3):
        assert training.train(range(6 * epoch, 6 * epoch + 6)) == [6 * epoch + 2, 6 * epoch + 5]
        assert same_on_all(training.model)
        assert_same(training.model, reference(OUTERS[outer], 6 * epoch + 6, hvd.size()))
        training.model.eval()


@together
def test_ranks_train_by_themselves_between() -> None:
    training = Training()
    before = hvd.metrics()["bytes_done"]
    training.train(range(2))
    assert hvd.metrics()["bytes_done"] == before
    assert not same_on_all(training.model)


@together
def test_parameters_are_the_first_ranks() -> None:
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(hvd.rank())
    hvd.DiLoCo(model.parameters(), every=2)
    assert_same(model, network())


def test_mixed_dtypes_frozen_parameters_and_buffers() -> None:
    model = Mixed()
    frozen = model.first.weight.clone()
    inner = inner_of(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = hvd.DiLoCo(model.named_parameters(), outer, every=2)
    for step in range(4):
        one_step(model, inner, hvd.rank(), step)
        outcome = diloco.step()
    assert outcome
    for p in model.parameters():
        rows = hvd.allgather(p.detach().double().reshape(1, -1))
        assert (rows == rows[0]).all()
    assert torch.equal(model.first.weight, frozen)
    assert not torch.equal(model.second.weight, Mixed().second.weight)
    means = hvd.allgather(model.norm.running_mean.unsqueeze(0))
    assert hvd.size() == 1 or not torch.equal(means[0], means[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert torch.equal(model.norm.running_mean, means[0])


def test_gradients_and_the_outer_optimizers_scheduler_are_kept() -> None:
    training = Training()
    assert training.outer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(training.outer, 1, gamma=0.5)
    for step in range(EVERY):
        one_step(training.model, training.inner, hvd.rank(), step)
        grads = [p.grad for p in training.model.parameters()]
        training.diloco.step()
    assert all(a is p.grad for a, p in zip(grads, training.model.parameters(), strict=True))
    scheduler.step()
    assert training.outer.param_groups[0]["lr"] == 0.35


@together
def test_a_process_set_and_the_others() -> None:
    members = list(range(hvd.size() - 1)) or [0]
    some = hvd.add_process_set(members)
    training = Training(process_set=some)
    inside = bool(some.included())
    assert training.train(range(6)) == ([2, 5] if inside else [])
    assert bool(training.diloco.state_dict()["rounds"]) is inside
    if inside:
        assert_same(training.model, reference(OUTERS["nesterov"], 6, len(members)))
    hvd.barrier()
    hvd.remove_process_set(some)


# ---- resuming


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_resumed_in_the_middle_of_a_period(outer: str, folder: Path) -> None:
    training = Training(OUTERS[outer])
    training.train(range(4))
    hvd.save_checkpoint(folder, training.state)
    training.train(range(4, 11))

    resumed = Training(OUTERS[outer])
    resumed.train(range(2))  # what it does before is forgotten
    hvd.load_checkpoint(folder, resumed.state)
    assert resumed.train(range(4, 11)) == [5, 8]
    assert resumed.bits() == training.bits()


def test_a_state_that_one_rank_keeps_by_itself() -> None:
    """torch's recipe: rank 0 saves, while the others go on."""
    training = Training()
    training.train(range(EVERY))
    if hvd.rank() == 0:
        state = copy.deepcopy(training.diloco.state_dict())
        assert state["steps"] == EVERY
        assert len(state["common"]) == 4
    training.train(range(EVERY, 3 * EVERY))
    assert same_on_all(training.model)


def test_steps_after_a_load_leave_the_loaded_state_as_it_was() -> None:
    """A program may go back to the same state twice."""
    training = Training(OUTERS["adam"])
    training.train(range(EVERY))
    saved = copy.deepcopy(training.diloco.state_dict())
    before = bits(saved)
    training.diloco.load_state_dict(saved)
    training.train(range(EVERY, 2 * EVERY))
    assert bits(saved) == before


def test_a_state_of_another_kind_is_refused() -> None:
    state = Training().diloco.state_dict()
    with pytest.raises(ValueError, match="saved with an outer optimizer"):
        Training(None).diloco.load_state_dict(state)
    other = hvd.DiLoCo(nn.Linear(2, 2).parameters(), every=2)
    with pytest.raises(ValueError, match=r"of other parameters: of 0.weight, .*parameter 0"):
        other.load_state_dict(state)


# ---- strangers


@together
def test_a_rank_that_counts_other_steps() -> None:
    training = Training()
    if hvd.rank() == 1:
        state = training.diloco.state_dict()
        training.diloco.load_state_dict({**state, "steps": EVERY})
    text = r"DiLoCo.\d+: ranks 0 and 1 differ in steps \(3 and 6\): do all load"
    before = [p.detach().clone() for p in training.model.parameters()]
    with pytest.raises(hvd.MismatchError, match=text):
        training.train(range(2 * EVERY))
    training.diloco.step()  # nothing was mixed with the models
    assert not any(map(torch.equal, before, training.model.parameters()))
    Training().train(range(EVERY))


@together
def test_a_rank_that_joins() -> None:
    training = Training()
    if hvd.rank() == 1:
        hvd.join()
    else:
        with pytest.raises(hvd.MismatchError, match=r"rank 1 joined .* equally many steps"):
            training.train(range(2 * EVERY))
        hvd.join()
    Training().train(range(EVERY))


@together
def test_another_outer_optimizer_on_one_rank() -> None:
    """It leads to other parameters, as does an outer step that fails on one rank only."""
    wrong = hvd.rank() == 1
    training = Training(lambda ps: torch.optim.SGD(ps, lr=0.5 if wrong else 0.7))
    training.train(range(EVERY))
    with pytest.raises(hvd.MismatchError, match=r"ranks 0 and 1 differ in the common 0\.weight"):
        training.train(range(EVERY, 2 * EVERY))

    training = Training()
    assert training.outer is not None

    def fail(*_: Any) -> None:
        raise ArithmeticError("disk full")

    if wrong:
        hook = training.outer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            training.train(range(EVERY))
        hook.remove()
    else:
        training.train(range(EVERY))
    with pytest.raises(hvd.MismatchError, match=r"differ in outer steps \(1 and 0\)"):
        training.train(range(EVERY, 2 * EVERY))


@together
def test_a_model_that_is_changed_on_one_rank() -> None:
    changes: list[tuple[Callable[[nn.Module], Any], str]] = [
        (lambda model: model.half(), r"norm\.weight was torch\.float32 on cpu when"),
        (lambda model: model.first.requires_grad_(True), r"first\.weight was frozen when"),
    ]
    for change, text in changes:
        model = Mixed()
        diloco = hvd.DiLoCo(model.named_parameters(), every=1)
        if hvd.rank() == 1:
            change(model)
        with pytest.raises(ValueError if hvd.rank() == 1 else Exception, match=text):
            diloco.step()
    model.first.requires_grad_(False)
    diloco.step()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "every": ({"every": 0}, ValueError, "every is 0, .*1 at least"),
    "every text": ({"every": "2"}, TypeError, "every is '2'"),
    "process_set": ({"process_set": 7}, TypeError, "process_set is 7"),
    "params": ({"params": {}}, TypeError, "params is of type dict"),
    "a number": ({"params": [1.0]}, TypeError, "parameter 0: a float is not a parameter"),
    "none": ({"params": []}, ValueError, "no parameter that requires"),
    "meta": ({"params": [torch.ones(2, device="meta", requires_grad=True)]}, TypeError, "meta"),
    "no optimizer": ({"outer_optimizer": 5}, TypeError, "outer_optimizer is of type int"),
    "another's": (
        {"outer_optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)},
        ValueError,
        "outer_optimizer lacks parameter 0",
    ),
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, everywhere: bool) -> None:
    changed, kind, text = WRONG[case]
    wrong = everywhere or hvd.rank() == hvd.size() - 1
    options: dict[str, Any] = {"params": network().parameters(), "every": 2}
    with pytest.raises(kind if wrong else Exception, match=text):
        hvd.DiLoCo(**{**options, **(changed if wrong else {})})
    Training().train(range(EVERY))


@together
def test_arguments_that_differ() -> None:
    wrong = hvd.rank() == 1
    model = network()
    other = inner_of(model) if wrong else None
    for options, text in (
        ({"every": 2 + wrong}, "every is 2 on rank 0 and 3 on rank 1"),
        ({"every": 2, "outer_optimizer": other}, "is NoneType on rank 0 and SGD on rank 1"),
    ):
        with pytest.raises(hvd.MismatchError, match=text):
            hvd.DiLoCo(model.parameters(), **options)  # type: ignore[arg-type]
    with pytest.raises(hvd.MismatchError, match=r"parameter 0 is \[3, 4\] .* \[4, 4\] of"):
        hvd.DiLoCo(nn.Linear(4, 3 + wrong).parameters(), every=2)
    pairs = list(model.named_parameters())
    with pytest.raises(hvd.MismatchError, match="in different orders"):
        hvd.DiLoCo(pairs[::-1] if wrong else pairs, every=2)
