# SPDX-License-Identifier: Apache-2.0
"""shutdown() and init() between passes, or while a pass is open: an optimizer goes on as if new."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from harness.toys import batch, loss_of, pair, train_both

pytestmark = pytest.mark.ranks(2, 4)

STEPS = 3


def make(**options: Any) -> tuple[Any, Any]:
    return pair(lambda ps: torch.optim.SGD(ps, lr=0.1), **options)[:2]


def push(model: Any, step: int) -> None:
    loss_of(model, batch(hvd.rank(), step)).backward()


def goes_on(model: Any, optimizer: Any, steps: range) -> None:
    """From where it is, as one process would on all ranks' batches; each step begins with
    zero_grad()."""
    reference = copy.deepcopy(model)
    train_both(model, optimizer, reference, torch.optim.SGD(reference.parameters(), lr=0.1), steps)
    check_equal(model)


def restart() -> None:
    hvd.shutdown()
    hvd.init()


def check_equal(model: Any) -> None:
    own = [p.detach().tolist() for p in model.parameters()]
    assert hvd.allgather_object(own) == [own] * hvd.size()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "compressed": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind != "compressed"])
def test_zero_grad_after_a_restart(kind: str) -> None:
    model, optimizer = make(**OPTIONS[kind])
    goes_on(model, optimizer, range(1))
    restart()
    goes_on(model, optimizer, range(1, 2))
    push(model, 2)
    restart()
    goes_on(model, optimizer, range(3, 3 + STEPS))


@pytest.mark.parametrize("kind", OPTIONS)
def test_step_after_a_restart(kind: str) -> None:
    """What was in flight is gone, on all ranks alike: step() reduces the gradients that are there,
    which are the rank's own, or the average already, as they were when the job ended."""
    model, optimizer = make(**OPTIONS[kind])
    optimizer.zero_grad()
    push(model, 1)
    restart()
    optimizer.step()
    check_equal(model)
    if kind != "compressed":
        goes_on(model, optimizer, range(2, 2 + STEPS))


def fail(model: Any) -> None:
    """A pass that ends when some gradients have been sent: they are in flight."""

    def no(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    hidden = model[0](batch(hvd.rank(), 1)[0])
    hidden.register_hook(no)
    with pytest.raises(ArithmeticError):
        model[2](model[1](hidden)).pow(2).sum().backward()


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_a_pass_has_failed_on(ranks: str) -> None:
    """On one: its gradients can't complete, so they are in flight for sure when the job ends."""
    model, optimizer = make()
    goes_on(model, optimizer, range(1))
    optimizer.zero_grad()
    if ranks == "all" or hvd.rank() == 0:
        fail(model)
    restart()
    assert all(p.grad is None for p in model.parameters())
    goes_on(model, optimizer, range(2, 2 + STEPS))


def test_synchronize_after_a_restart() -> None:
    model, optimizer = make()
    push(model, 1)
    restart()
    optimizer.zero_grad()
    push(model, 2)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    check_equal(model)


def test_an_optimizer_that_went_away_in_flight() -> None:
    """The next one, made after the restart, finds nothing of it in its way."""
    model, optimizer = make()
    push(model, 1)
    del model, optimizer
    restart()
    goes_on(*make(), range(STEPS))
