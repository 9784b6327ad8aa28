# SPDX-License-Identifier: Apache-2.0
"""Optimizers that ordinary code makes: copied, changed by hand, of any base class, sharing
parameters. None of them trains on one rank's gradients in silence."""

from __future__ import annotations

import abc
import copy
import pickle
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd
from harness.toys import (
    assert_same,
    batch,
    grad_is,
    loss_of,
    network,
    push,
    total,
    toys,
    train,
    train_both,
)

pytestmark = pytest.mark.ranks(2, 3)
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "a copy's copy": lambda x: copy.deepcopy(copy.deepcopy(x)),
}
T = TypeVar("T")


# ---- copies


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_copy_raises_until_it_is_distributed(how: str, op: Any) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=op)
    train(model, optimizer, range(1))
    twin, twins = COPIES[how]((model, optimizer))
    assert isinstance(twins, torch.optim.SGD)
    torch.testing.assert_close(twins.state_dict(), optimizer.state_dict())
    loss_of(twin, batch(hvd.rank(), 1)).backward()
    with pytest.raises(RuntimeError, match=r"copied or unpickled.*on every rank, call"):
        twins.step()
    twins.zero_grad()
    twins = hvd.DistributedOptimizer(twins, twin.named_parameters(), op=op)
    train(model, optimizer, range(1, 2))
    train(twin, twins, range(1, 2))
    assert_same(twin, model)


def test_a_copy_steps_where_no_other_rank_is() -> None:
    """After the job, as where a checkpoint is tried out; with a scheduler and step hooks."""
    (p,), optimizer = toys()
    kept = pickle.dumps(optimizer)
    hvd.shutdown()
    try:
        alone = pickle.loads(kept)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(alone, 0.5)
        calls: list[int] = []
        alone.register_step_post_hook(lambda *_: calls.append(1))
        (own,) = alone.param_groups[0]["params"]
        for _ in range(2):
            own.grad = torch.ones(4)
            alone.step()
            scheduler.step()
        assert type(alone) is torch.optim.SGD
        assert own.tolist() == [-1.5] * 4
        assert calls == [1, 1]
    finally:
        hvd.init()
    assert p.tolist() == [0.0] * 4


def test_what_it_is_can_be_told() -> None:
    _, optimizer = toys()
    assert "farandole" in type(optimizer).__module__
    assert repr(optimizer).startswith("farandole.DistributedOptimizer: SGD (")
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)


# ---- parameters that come by hand


def _in_a_new_list(group: dict[str, Any], p: Tensor) -> None:
    group["params"] = [*group["params"], p]


def _in_place_of(group: dict[str, Any], p: Tensor) -> None:
    group["params"] = [p]


HANDS = {
    "append": lambda o, p: o.param_groups[0]["params"].append(p),
    "a new list": lambda o, p: _in_a_new_list(o.param_groups[0], p),
    "instead": lambda o, p: _in_place_of(o.param_groups[0], p),
    "a new group": lambda o, p: o.param_groups.append({**o.param_groups[0], "params": [p]}),
}


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("when", ["before zero_grad", "before backward", "before step"])
@pytest.mark.parametrize("view", [False, True])
def test_parameters_by_hand_are_reduced(hand: str, when: str, view: bool) -> None:
    (p,), optimizer = toys(gradient_as_bucket_view=view)
    push(p)
    optimizer.step()
    new = nn.Parameter(torch.zeros(4))
    if when == "before zero_grad":
        HANDS[hand](optimizer, new)
    optimizer.zero_grad()
    if when == "before backward":
        HANDS[hand](optimizer, new)
    push(new, 1)
    if when == "before step":
        HANDS[hand](optimizer, new)
    optimizer.step()
    grad_is(new, total(hvd.Average, [1]))
    optimizer.zero_grad()
    push(new, 2)  # within the pass by now
    grad_is(new, total(hvd.Average, [2]))


def test_too_late_for_a_sum() -> None:
    (p,), optimizer = toys(op=hvd.Sum)
    new = nn.Parameter(torch.zeros(4))
    push(p)
    push(new)
    optimizer.param_groups[0]["params"].append(new)
    with pytest.raises(ValueError, match="reduced already"):
        optimizer.step()
    optimizer.zero_grad()
    push(new)
    optimizer.step()
    grad_is(new, total(hvd.Sum, [0]))


def test_an_assigned_state_dict() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict({k: x.clone() for k, x in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    reference = network()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    train_both(model, optimizer, reference, plain, range(2))


# ---- base classes


class Interface(abc.ABC, torch.optim.SGD):
    """As pytorch-optimizer's."""


class Parametric(Generic[T], torch.optim.SGD):
    """Generic before Optimizer."""


class Slotted(torch.optim.SGD):
    """With a step() of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [Interface, Parametric, Slotted])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}], ids=str)
def test_any_base_class(kind: type[torch.optim.SGD], options: dict[str, Any]) -> None:
    models = [network() for _ in range(2)]
    kinds = [kind, torch.optim.SGD]
    steppers = [
        hvd.DistributedOptimizer(k(m.parameters(), lr=0.1, momentum=0.9), **options)
        for k, m in zip(kinds, models, strict=True)
    ]
    assert isinstance(steppers[0], kind)
    assert isinstance(steppers[0], hvd.ReducingOptimizer)
    for model, stepper in zip(models, steppers, strict=True):
        train(model, stepper, range(2))
    assert_same(*models)


# ---- one parameter in two optimizers


def test_one_parameter_in_two_optimizers() -> None:
    """A shared encoder of actor and critic: the newer one reduces it, the older one is refused."""
    encoder, *heads = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    actor, critic = (
        hvd.DistributedOptimizer(torch.optim.SGD([encoder, head], lr=1.0)) for head in heads
    )
    for k in range(2):
        push(encoder, k)
        critic.step()
        grad_is(encoder, total(hvd.Average, [k]))
        for act in (actor.step, actor.synchronize):
            with pytest.raises(
                RuntimeError, match=r"group\[0\]\[0\] also belongs to a newer Distributed"
            ):
                act()
        with pytest.raises(RuntimeError, match="one optimizer of all"), actor.skip_synchronize():
            actor.step()
        actor.zero_grad()
        critic.zero_grad()


def test_added_to_a_second_optimizer() -> None:
    (p,), older = toys()
    (_,), newer = toys()
    push(p)
    newer.add_param_group({"params": [p]})  # what the older one has reduced counts no more
    with pytest.raises(RuntimeError, match="newer"):
        older.step()
    newer.zero_grad()
    push(p, 1)
    newer.step()
    grad_is(p, total(hvd.Average, [1]))


# ---- autograd


@pytest.mark.parametrize("call", ["allreduce_", "broadcast_", "grouped_allreduce_"])
def test_a_call_in_place_is_seen_by_autograd(call: str) -> None:
    def run(x: Tensor) -> Any:
        if call == "broadcast_":
            return hvd.broadcast_(x, 0, name="seen")
        given: Any = [x] if call.startswith("grouped") else x
        return getattr(hvd, call)(given, name="seen")

    for _ in range(3):  # the second time it takes the short way
        w = torch.ones(3, requires_grad=True)
        saved = w.exp()
        run(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
        with torch.inference_mode():
            run(torch.ones(3))
        run(w)  # a leaf, as Horovod takes it
