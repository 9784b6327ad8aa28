# SPDX-License-Identifier: Apache-2.0
"""A training loop's states in one process: a replica for each rank, and gradients by definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strangers.loops import CLIP, Loop, Net, batch, loss_of, plain_optimizer, steps
from strangers.program import Array

__all__ = ["State", "difference", "states"]

State = list["Array | None"]  # parameters, then gradients
_CLOSE = 1e-7


def states(loop: Loop, ranks: int) -> list[State]:
    """After each step; the same on all ranks."""
    return _Model(loop, ranks).run()


class _Model:
    """One set of parameters, since all ranks' are equal, and what `.grad` holds on each rank."""

    def __init__(self, loop: Loop, ranks: int) -> None:
        self._loop, self._ranks = loop, ranks
        self._built = self._number = 0
        self._seen: list[State] = []
        self._build()

    def _build(self) -> None:
        self._net = Net(self._built, self._loop)
        self._optimizer = plain_optimizer(self._loop, list(self._net.parameters()))
        self._built += 1
        count = len(list(self._net.parameters()))
        self._grads: list[list[Tensor | None]] = [[None] * count for _ in range(self._ranks)]
        self._count_anew()

    def _count_anew(self) -> None:
        self._counted = 0  # since the last reduction
        self._settled = False  # nothing has come since

    def run(self) -> list[State]:
        for word, *arguments in steps(self._loop):
            if word == "backward":
                self._backward(*arguments)
            elif word == "zero":
                self._zero(arguments[0])
            elif word == "step":
                self._step(arguments[0])
            elif (word, arguments[:1]) == ("raise", ["zero"]):
                self._zero("optimizer_none")
            elif word == "rebuild" or (word, arguments[:1]) == ("raise", ["drop"]):
                self._build()
            elif word == "edit":
                self._reduce()
                self._change(lambda g: g * 0.5)
        return self._seen

    def _backward(self, used: list[bool], hold: bool, form: str) -> None:
        parameters = list(self._net.parameters())
        for rank, own in enumerate(self._grads):
            loss = loss_of(self._net, batch(rank, self._number), used[rank % len(used)], form)
            for p in parameters:
                p.grad = None
            loss.backward()
            for i, p in enumerate(parameters):
                old, g = own[i], None if p.grad is None else p.grad.to_dense()
                own[i] = old if g is None else g if old is None else old + g
        self._number += 1
        self._counted += not hold
        self._settled = False
        if not hold and self._counted >= self._loop.passes:
            self._reduce()

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._grads = [[None if g is None else change(g) for g in own] for own in self._grads]

    def _zero(self, form: str) -> None:
        if form.endswith("none"):
            self._grads = [[None] * len(own) for own in self._grads]
        else:
            self._change(torch.zeros_like)
        if form.startswith("optimizer"):
            self._count_anew()

    def _reduce(self) -> None:
        if self._settled:
            return
        for i, p in enumerate(self._net.parameters()):
            parts = [own[i] for own in self._grads]
            if any(part is not None for part in parts):
                total = self._combine([torch.zeros_like(p) if g is None else g for g in parts])
                for own in self._grads:
                    own[i] = total
        self._count_anew()
        self._settled = True

    def _combine(self, parts: list[Tensor]) -> Tensor:
        stack = torch.stack(parts).detach()
        if self._loop.op == "Min":
            return stack.amin(0)
        return stack.sum(0) if self._loop.op == "Sum" else stack.mean(0)

    def _step(self, form: str) -> None:
        if form == "closure":
            self._zero("optimizer_none")
            self._backward([True] * self._ranks, False, "plain")
        self._reduce()
        parameters = list(self._net.parameters())
        for p, g in zip(parameters, self._grads[0], strict=True):
            p.grad = None if g is None else g.detach().clone()
        if form.startswith("clip"):
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        self._optimizer.step()
        self._grads = [
            [None if p.grad is None else p.grad.clone() for p in parameters]
            for _ in range(self._ranks)
        ]
        self._count_anew()
        state: State = [p.detach().numpy().copy() for p in parameters]
        state += [None if p.grad is None else p.grad.numpy().copy() for p in parameters]
        self._seen.append(state)


def difference(loop: Loop, got: list[State], right: list[State]) -> str:
    """What is wrong with a rank's states; empty: nothing."""
    names = [name for name, _ in Net(0, loop).named_parameters()]
    names += [f"{name}.grad" for name in names]
    if len(got) != len(right):
        return f"{len(got)} steps instead of {len(right)}"
    for step, (ours, theirs) in enumerate(zip(got, right, strict=True)):
        for name, x, y in zip(names[: len(theirs)], ours, theirs, strict=True):
            if text := _compare(x, y):
                return f"after step {step} {name} {text}"
    return ""


def _compare(x: Any, y: Any) -> str:
    if x is None or y is None:
        return "" if x is y else f"is {_short(x)}, not {_short(y)}"
    if x.shape != y.shape:
        return f"has shape {x.shape}, not {y.shape}"
    if np.allclose(x, y, rtol=_CLOSE, atol=_CLOSE):
        return ""
    return f"is {_short(x)}, not {_short(y)}"


def _short(x: Any) -> str:
    return "None" if x is None else np.array2string(x.ravel()[:4], precision=5)
