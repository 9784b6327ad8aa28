# SPDX-License-Identifier: Apache-2.0
"""The wrapped optimizer is the optimizer: its state, class, schedulers and pickles stay."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from farandole.arrays import arena
from harness.in_flight import late
from harness.toys import (
    batch,
    grad_is,
    loss_of,
    momentum,
    network,
    push,
    push_each,
    total,
    toys,
    train_both,
)

STEPS = 4


@pytest.fixture
def trained() -> tuple[nn.Module, Any]:
    model = network()
    return model, momentum(model.parameters())


@pytest.mark.ranks(2, 3, 4)  # a single rank needs no views
def test_memory_is_short_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed there: the older optimizer still reduces. A second try succeeds."""

    def allocate(_: int) -> Any:
        raise hvd.LibraryError("memory is short")

    (p,), older = toys()
    new: Any = torch.optim.SGD([p], lr=1.0)
    if late():
        with monkeypatch.context() as patched:
            patched.setattr(arena, "allocate", allocate)
            with pytest.raises(hvd.LibraryError, match="memory is short"):
                hvd.DistributedOptimizer(new, gradient_as_bucket_view=True)
        assert type(new) is torch.optim.SGD
    push(p)
    grad_is(p, total(hvd.Average, [0]))
    older.step()
    older.zero_grad()
    hvd.DistributedOptimizer(new, gradient_as_bucket_view=True)
    push(p)
    grad_is(p, total(hvd.Average, [0]))
    new.step()
    with pytest.raises(RuntimeError, match="belongs to a newer"):
        older.step()


@pytest.mark.ranks(2, 3, 4)
def test_memory_is_short_for_a_group_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(_: int) -> Any:
        raise hvd.LibraryError("memory is short")

    (p,), optimizer = toys(gradient_as_bucket_view=True)
    q = nn.Parameter(torch.zeros(4))
    if late():
        with monkeypatch.context() as patched:
            patched.setattr(arena, "allocate", allocate)
            with pytest.raises(hvd.LibraryError, match="memory is short"):
                optimizer.add_param_group({"params": [q]})
    optimizer.add_param_group({"params": [q]})
    push_each((p, 0), (q, 1))
    grad_is(p, total(hvd.Average, [0]))
    grad_is(q, total(hvd.Average, [1]))
    optimizer.step()


def test_an_optimizer_whose_class_can_have_no_subclass() -> None:
    """It stays as it was, and no hook stays at its parameters."""

    class Final(torch.optim.SGD):
        def __init_subclass__(cls, **_: Any) -> None:
            raise TypeError("Final is final")

    p, steps = nn.Parameter(torch.zeros(4)), list[int]()
    optimizer: Any = Final([p], lr=1.0)
    optimizer.step = lambda: steps.append(1)
    with pytest.raises(TypeError, match="Final is final"):
        hvd.DistributedOptimizer(optimizer)
    push(p)
    grad_is(p, total(hvd.Sum, [0], ranks=[hvd.rank()]))
    optimizer.step()
    assert steps == [1]
    assert type(optimizer) is Final


def test_same_object_state_and_class(trained: tuple[nn.Module, Any]) -> None:
    model, optimizer = trained
    loss_of(model, batch(0, 0)).backward()  # the same data on all ranks, before wrapping
    optimizer.step()
    state, groups = optimizer.state, optimizer.param_groups
    plain = copy.deepcopy(optimizer.state_dict())
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.SGD)
    assert wrapped.state is state
    assert wrapped.param_groups is groups
    assert type(wrapped).__name__ == "SGD"
    assert len(state) == 4
    torch.testing.assert_close(wrapped.state_dict(), plain)
    wrapped.load_state_dict(plain)
    torch.testing.assert_close(wrapped.state_dict(), plain)


def test_copies_of_a_model_reduce_nothing(trained: tuple[nn.Module, Any]) -> None:
    model, optimizer = trained
    wrapped = hvd.DistributedOptimizer(optimizer)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    wrapped.step()
    buffer = io.BytesIO()
    torch.save(model, buffer)  # hooks do not go along, and torch does not complain
    clone = copy.deepcopy(model)
    if hvd.rank() == 0:
        loss_of(clone, batch(hvd.rank(), 0)).backward()  # reduces nothing
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()


@pytest.mark.parametrize("wrap_first", [True, False])
def test_schedulers(trained: tuple[nn.Module, Any], wrap_first: bool) -> None:
    model, optimizer = trained
    reference = network()
    plain = momentum(reference.parameters())
    if wrap_first:
        optimizer = hvd.DistributedOptimizer(optimizer)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1.0 / (1 + i)) for o in (optimizer, plain)
    ]
    optimizer = optimizer if wrap_first else hvd.DistributedOptimizer(optimizer)
    for step in range(STEPS):
        train_both(model, optimizer, reference, plain, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()  # warnings are errors here: torch must see that step() was called
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] != 0.1


def test_step_hooks_run_once(trained: tuple[nn.Module, Any]) -> None:
    model, optimizer = trained
    wrapped = hvd.DistributedOptimizer(optimizer)
    calls = []
    wrapped.register_step_post_hook(lambda *_: calls.append(1))
    wrapped.load_state_dict(wrapped.state_dict())  # torch patches step() again here
    loss_of(model, batch(hvd.rank(), 0)).backward()
    wrapped.step()
    assert calls == [1]
