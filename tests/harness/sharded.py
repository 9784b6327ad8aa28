# SPDX-License-Identifier: Apache-2.0
"""Optimizers, elementwise and not, and training with shard_state=True, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd

__all__ = [
    "MAKES",
    "Lamb",
    "Lion",
    "Make",
    "assert_states_equal",
    "same_on_all",
    "sharded",
]

Make = Callable[..., torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Signs of momentum (Chen et al., 2023), as a user would write it."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["count"] = torch.zeros_like(p), torch.zeros(1)
                state["count"] += 1
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * (0.9 * state["m"] + 0.1 * p.grad).sign())
                state["m"].mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class Lamb(Lion):
    """Steps as long as the parameter's norm: not elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


MAKES: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.05),  # the one that nobody here thought of
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),  # has state from the start
    "Lion": Lion,
}


def sharded(model: nn.Module, make: Make = MAKES["Adam"], **options: Any) -> Any:
    optimizer = make(model.parameters())
    options = {"shard_state": "elementwise" if make is Lion else True, **options}
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def same_on_all(model: nn.Module) -> None:
    for p in model.parameters():
        everyone = hvd.allgather(p.detach().reshape(1, -1).double())
        assert (everyone == everyone[0]).all()


def assert_states_equal(one: Any, other: Any) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        for key, value in state.items():
            torch.testing.assert_close(
                torch.as_tensor(value),
                torch.as_tensor(other["state"][number][key]),
                rtol=1e-7,
                atol=1e-9,
                check_stride=True,
            )
