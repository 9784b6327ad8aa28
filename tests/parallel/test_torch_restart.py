# SPDX-License-Identifier: Apache-2.0
"""shutdown() and init() between passes, or while a pass is open: an optimizer goes on as if new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2, 4)

STEPS = 3


class Training:
    """A net whose gradients differ by rank and step; `plain` takes the same steps by hand."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.plain = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1),
            named_parameters=self.model.named_parameters(),
            **options,
        )

    def loss(self, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        return self.model(x).pow(2).sum()

    def gradients(self, step: int) -> list[torch.Tensor]:
        """The average over all ranks, worked out on each of them."""
        found = [
            torch.autograd.grad(self.loss(step, rank), list(self.model.parameters()))
            for rank in range(hvd.size())
        ]
        return [torch.stack(one).mean(0) for one in zip(*found, strict=True)]

    def step(self, step: int) -> None:
        expected = self.gradients(step)
        before = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer.zero_grad()
        self.loss(step, hvd.rank()).backward()
        self.optimizer.step()
        for p, old, gradient in zip(self.model.parameters(), before, expected, strict=True):
            torch.testing.assert_close(p.detach(), old - 0.1 * gradient)


def restart() -> None:
    hvd.shutdown()
    hvd.init()


def check_equal_models(training: Training) -> None:
    own = [p.detach().tolist() for p in training.model.parameters()]
    assert hvd.allgather_object(own) == [own] * hvd.size()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "compressed": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("kind", [kind for kind in OPTIONS if kind != "compressed"])
def test_zero_grad_after_a_restart(kind: str) -> None:
    training = Training(**OPTIONS[kind])
    training.step(0)
    training.loss(1, hvd.rank()).backward()
    restart()
    for step in range(2, 2 + STEPS):
        training.step(step)  # begins with zero_grad()
    check_equal_models(training)


@pytest.mark.parametrize("kind", OPTIONS)
def test_step_after_a_restart(kind: str) -> None:
    """What was in flight is gone, on all ranks alike: step() reduces the gradients that are there,
    which are the rank's own, or the average already, as they were when the job ended."""
    training = Training(**OPTIONS[kind])
    training.optimizer.zero_grad()
    training.loss(1, hvd.rank()).backward()
    restart()
    training.optimizer.step()
    check_equal_models(training)
    if kind != "compressed":
        for step in range(2, 2 + STEPS):
            training.step(step)
        check_equal_models(training)


def fail(training: Training) -> None:
    """A pass that ends when some gradients have been sent: they are in flight."""

    def no(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    x = torch.randn(6, 4)
    hidden = training.model[0](x)
    hidden.register_hook(no)
    with pytest.raises(ArithmeticError):
        training.model[2](training.model[1](hidden)).pow(2).sum().backward()


@pytest.mark.parametrize("ranks", ["all", "one"])
def test_a_pass_has_failed_on(ranks: str) -> None:
    """On one: its gradients can't complete, so they are in flight for sure when the job ends."""
    training = Training()
    training.step(0)
    training.optimizer.zero_grad()
    if ranks == "all" or hvd.rank() == 0:
        fail(training)
    restart()
    assert all(p.grad is None for p in training.model.parameters())
    for step in range(2, 2 + STEPS):
        training.step(step)
    check_equal_models(training)


def test_synchronize_after_a_restart() -> None:
    training = Training()
    training.loss(1, hvd.rank()).backward()
    restart()
    training.optimizer.zero_grad()
    training.loss(2, hvd.rank()).backward()
    training.optimizer.synchronize()
    with training.optimizer.skip_synchronize():
        training.optimizer.step()
    check_equal_models(training)


def test_an_optimizer_that_went_away_in_flight() -> None:
    """The next one, made after the restart, finds nothing of it in its way."""
    training = Training()
    training.loss(1, hvd.rank()).backward()
    del training
    restart()
    after = Training()
    for step in range(STEPS):
        after.step(step)
    check_equal_models(after)
