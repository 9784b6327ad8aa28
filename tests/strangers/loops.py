# SPDX-License-Identifier: Apache-2.0
"""A training loop as a program: an optimizer's options, and moves that all ranks make."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CLIP", "FEATURES", "Loop", "Net", "batch", "loss_of", "plain_optimizer", "steps"]

CLIP = 0.1  # the norm that gradients are clipped to

# What STRANGERS_WITHOUT may name: moves and their forms.
FEATURES = (
    *("backward", "backward:penalty", "backward:query", "backward:hold", "backward:unused"),
    *("zero:optimizer_none", "zero:optimizer_zero", "zero:model_none", "zero:model_zero"),
    *("step:plain", "step:clip", "step:clip_own", "step:closure", "step:timeout"),
    *("step:timeout_drop", "step:interrupt", "raise", "rebuild", "copy", "loop:late"),
    *("loop:memory", "broadcast", "edit", "mean", "views", "passes", "op:Sum", "op:Min", "groups"),
)

_ENDS = (["optimizer_none"], ["optimizer_zero"], ["zero"], ["drop"])  # forms of zero and raise
_PLAIN = {"backward", "step:plain", "zero:optimizer_none", "loop:late", "loop:memory"}


@dataclass(frozen=True)
class Loop:
    """`moves`: a word and its arguments, as steps() reads them."""

    moves: tuple[Any, ...]
    op: str = "Average"
    passes: int = 1
    mean: bool = False
    views: bool = False  # gradient_as_bucket_view
    groups: int = 0
    named: bool = True
    width: int = 4
    optimizer: str = "sgd"

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps({"loop": asdict(self)})

    def features(self, ranks: int) -> set[str]:
        """Those of FEATURES that it uses on so many ranks, apart from what all loops have."""
        used = {f"op:{self.op}"}
        used |= {"passes"} if self.passes > 1 else set()
        used |= {"mean"} if self.mean else set()
        used |= {"views"} if self.views else set()
        used |= {"groups"} if self.groups else set()
        for word, *arguments in self.moves:
            used.add(word)
            if word in ("step", "zero"):
                used.add(f"{word}:{arguments[0]}")
            if word == "backward":
                flags, hold, form = arguments
                used.add(f"backward:{form}")
                used |= {"backward:hold"} if hold else set()
                used |= set() if all(flags[:ranks]) else {"backward:unused"}
        return used & (set(FEATURES) - _PLAIN)

    @staticmethod
    def read(found: dict[str, Any]) -> Loop:
        """From what text() has written."""
        return Loop(**found)


class Net(nn.Module):
    """Two layers, and a head that not every batch uses; the same on all ranks by its number."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 2)
        self.head = nn.Linear(width, 1)
        self.to(torch.float64)


def batch(rank: int, number: int) -> Tensor:
    """(5, 3) of a rank and a backward pass."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def loss_of(net: Net, x: Tensor, used: bool, form: str = "plain") -> Any:
    """`form` penalty: and the size of its gradients, by a second derivative."""
    hidden = torch.tanh(net.first(x))
    loss: Any = (net.second(hidden) - x[:, :2]).square().mean()
    if used:
        loss = loss + net.head(hidden).square().mean()
    if form == "plain":
        return loss
    gradients = torch.autograd.grad(
        loss, list(net.parameters()), create_graph=form == "penalty", allow_unused=True
    )
    if form == "query":  # looked at, and not used; the graph is gone
        return loss_of(net, x, used)
    return loss + sum((g.square().sum() for g in gradients if g is not None), torch.zeros(()))


def plain_optimizer(loop: Loop, net: Net) -> torch.optim.Optimizer:
    """What one process would use."""
    if loop.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=0.01)
    momentum = 0.9 if loop.optimizer == "momentum" else 0.0
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)


def steps(loop: Loop) -> list[tuple[Any, ...]]:
    """The moves that mean something, in the same words.

    A minimum is of what each rank has accumulated for one step: no pass beyond those, none of it
    missing. Gradients that are under way are zeroed by their optimizer only, as farandole says. A
    mean has no pass beyond those after one in which ranks used different layers. A rank that gives
    up a step has promised no second reduction in it, for which the others would wait.
    """
    found: list[tuple[Any, ...]] = []
    arrived = 0  # backward passes since gradients were last reduced or reset
    apart = False  # in one of them ranks used different layers
    settled = False  # since then all have synchronized
    linear = loop.op in ("Average", "Sum")
    for word, *arguments in loop.moves:
        if word == "backward":
            used, hold, form = arguments
            if not linear:
                if arrived >= loop.passes:
                    continue
                used, hold = [True] * len(used), False
            if not arrived:
                apart = False
            if loop.mean and apart and arrived >= loop.passes:
                continue
            arrived += 1
            settled = False
            apart |= len({*used}) > 1
            found.append((word, used, hold, form))
            continue
        if (word, arguments[:1]) == ("zero", ["model_zero"]) and arrived:
            arguments = ["optimizer_zero"]
        if (word, arguments[:1]) == ("step", ["timeout_drop"]) and arrived > loop.passes:
            arguments = ["timeout", arguments[1]]
        if word == "step" and arguments[0] == "interrupt" and settled:
            arguments = ["plain", []]  # nothing is left to wait for, so nobody waits
        ends = word in ("step", "rebuild") or arguments[:1] in _ENDS
        settled = word == "edit" or (settled and not ends)
        if word == "step" and arguments[0] == "closure":
            found.append(("zero", "optimizer_none"))
        if word in ("zero", "step", "rebuild", "edit") or arguments[:1] == ["drop"]:
            arrived = 0
        found.append((word, *arguments))
    found.append(("step", "plain", []))
    return found
