# SPDX-License-Identifier: Apache-2.0
"""A training loop as a program: an optimizer's options, and moves that all ranks make."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CLIP", "Loop", "Net", "batch", "loss_of", "plain_optimizer", "steps"]

CLIP = 0.1  # the norm that gradients are clipped to

_ENDS = (["zero"], ["drop"])  # forms of raise
_INSTEAD = {
    "split": {"closure": "plain"},
}


@dataclass(frozen=True)
class Loop:
    """`moves`: a word and its arguments, as steps() reads them."""

    moves: tuple[Any, ...]
    op: str = "Average"
    passes: int = 1
    views: bool = False  # gradient_as_bucket_view
    named: bool = True
    width: int = 4
    optimizer: str = "sgd"
    kind: str = "plain"  # or one of the above; split: two optimizers
    table: str = ""  # an embedding with sparse gradients: rows; dense: sparse_as_dense

    @property
    def linear(self) -> bool:
        """Whether what comes after a reduction can be reduced with its result."""
        return self.op == "Average"

    @property
    def dense(self) -> bool:
        """sparse_as_dense: rows have no minimum."""
        return self.table == "dense" or self.op == "Min"

    @property
    def sparse(self) -> bool:
        """Whether `.grad` of the table is sparse: torch can't clip it, and Adam not step."""
        return self.table != ""

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps({"loop": asdict(self)})

    @staticmethod
    def read(found: dict[str, Any]) -> Loop:
        """From what text() has written."""
        return Loop(**found)


class Net(nn.Module):
    """Two layers, and a head and a table that not every batch uses; the same on all ranks by its
    number."""

    def __init__(self, number: int, loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(3, loop.width)
        self.second = nn.Linear(loop.width, 2)
        self.head = nn.Linear(loop.width, 1)
        self.table = nn.Embedding(6, 3, sparse=True) if loop.table else None
        self.to(torch.float64)

    def looked_up(self, x: Tensor) -> Any:
        """Rows of the table for a batch; 0 without one."""
        return self.table((7 * x[:, 0]).long() % 6) if self.table is not None else 0.0


def batch(rank: int, number: int) -> Tensor:
    """(5, 3) of a rank and a backward pass."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def loss_of(net: Net, x: Tensor, used: bool, form: str = "plain") -> Any:
    """`form` penalty: and the size of its gradients, by a second derivative; again: the head is
    used in three reentrant segments, whose passes are parts of the pass."""
    hidden = torch.tanh(net.first(x + net.looked_up(x) if used else x))
    if form == "again":
        total: Any = (net.second(hidden) - x[:, :2]).square().mean()
        rows: Any = lambda: net.looked_up(x).square().mean() if used and net.table else 0.0  # noqa: E731
        for _ in range(3):
            add = lambda t, h: t + net.head(h).square().mean() + rows()  # noqa: E731
            total = checkpoint(add, total, hidden, use_reentrant=True)
        return total
    loss: Any = (net.second(hidden) - x[:, :2]).square().mean()
    if used:
        loss = loss + net.head(hidden).square().mean()
    if form == "plain":
        return loss
    dense = [p for p in net.parameters() if net.table is None or p is not net.table.weight]
    gradients = torch.autograd.grad(loss, dense, create_graph=form == "penalty", allow_unused=True)
    if form == "query":  # looked at, and not used; the graph is gone
        return loss_of(net, x, used)
    return loss + sum((g.square().sum() for g in gradients if g is not None), torch.zeros(()))


def plain_optimizer(loop: Loop, parameters: list[Any]) -> torch.optim.Optimizer:
    """What one process would use."""
    if loop.optimizer == "adam" and not loop.sparse:
        return torch.optim.Adam(parameters, lr=0.01)
    momentum = 0.9 if loop.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def steps(loop: Loop) -> list[tuple[Any, ...]]:
    """The moves that mean something, in the same words.

    What can't be told from a reduction's result comes after the step only, and gradients of another
    op than Average are reset between steps, as farandole says. Two optimizers take no closure.
    Sparse gradients are not clipped, and sparse momentum is not broadcast.
    """
    found: list[tuple[Any, ...]] = []
    arrived = counted = 0  # passes since the last reduction: all, and those outside of no_sync()
    reduced = False  # since the last step or reset
    for word, *arguments in loop.moves:
        if word == "broadcast" and loop.sparse and loop.optimizer == "momentum":
            continue
        if word == "step" and arguments[0] in _INSTEAD.get(loop.kind, {}):
            arguments = [_INSTEAD[loop.kind][arguments[0]]]
        if word == "step" and loop.sparse and arguments[0].startswith("clip"):
            arguments = ["plain"]
        if word == "backward" and reduced and not loop.linear:
            continue
        if word == "backward":
            if loop.op == "Min":  # of what each rank has: none of it missing
                form = arguments[2].replace("again", "plain")  # nor in parts
                arguments = [[True] * len(arguments[0]), arguments[1], form]
            arrived += 1
            counted += not arguments[1]
            if not arguments[1] and counted >= loop.passes:
                arrived, counted, reduced = 0, 0, True
        elif word == "edit":
            if arrived and reduced and not loop.linear:
                continue
            arrived, counted, reduced = 0, 0, True
        elif word in ("step", "zero", "rebuild") or arguments[:1] in _ENDS:
            if word == "zero" and (arrived or not loop.linear):  # the model's counts no passes anew
                arguments = [arguments[0].replace("model", "optimizer")]
            arrived, counted, reduced = 0, 0, False
        found.append((word, *arguments))
        if word == "step" and loop.op != "Average":
            found.append(("zero", "optimizer_none"))
    found.append(("step", "plain"))
    return found
