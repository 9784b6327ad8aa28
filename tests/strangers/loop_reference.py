# SPDX-License-Identifier: Apache-2.0
"""A training loop's states in one process: a replica for each rank, and gradients by definition."""

from __future__ import annotations

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
    """One set of parameters, since all ranks' are equal, and each rank's gradients since the last
    reduction."""

    def __init__(self, loop: Loop, ranks: int) -> None:
        self._loop, self._ranks = loop, ranks
        self._built = self._number = 0
        self._seen: list[State] = []
        self._build()

    def _build(self) -> None:
        self._net = Net(self._built, self._loop.width)
        self._optimizer = plain_optimizer(self._loop, self._net)
        self._built += 1
        self._reset()

    def _reset(self) -> None:
        self._local: list[list[Tensor | None]] = [
            [None] * len(list(self._net.parameters())) for _ in range(self._ranks)
        ]
        self._passes = self._reduced = 0  # since the last reduction; in this step, before that

    def run(self) -> list[State]:
        for word, *arguments in steps(self._loop):
            if word == "backward":
                self._backward(*arguments)
            elif word == "zero":
                self._zero(arguments[0])
            elif word == "step":
                self._step(arguments[0])
            elif word == "raise":
                self._after_raise(arguments[0])
            elif word == "rebuild":
                self._build()
            elif word == "edit":
                self._reduce()
                for p in self._net.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        return self._seen

    def _backward(self, used: list[bool], hold: bool, form: str) -> None:
        parameters = list(self._net.parameters())
        for rank, local in enumerate(self._local):
            loss = loss_of(self._net, batch(rank, self._number), used[rank % len(used)], form)
            for i, g in enumerate(torch.autograd.grad(loss, parameters, allow_unused=True)):
                if g is not None:
                    old = local[i]
                    local[i] = g if old is None else old + g
        self._number += 1
        self._passes += 1

    def _zero(self, form: str) -> None:
        for i, p in enumerate(self._net.parameters()):
            if p.grad is None and any(local[i] is not None for local in self._local):
                p.grad = torch.zeros_like(p)  # of whatever some rank has accumulated
        self._reset()
        self._net.zero_grad(set_to_none=form.endswith("none"))

    def _after_raise(self, then: str) -> None:
        if then == "drop":
            self._build()
        elif then == "zero":
            self._zero("optimizer_none")

    def _reduce(self) -> None:
        passes = self._passes + self._reduced
        for i, p in enumerate(self._net.parameters()):
            parts = [local[i] for local in self._local]
            if self._loop.mean and self._reduced and p.grad is not None:
                p.grad *= self._reduced / passes
            if all(part is None for part in parts):
                continue
            total = self._combine([torch.zeros_like(p) if g is None else g for g in parts])
            p.grad = total if p.grad is None else p.grad + total
        self._reset()
        self._reduced = passes

    def _combine(self, parts: list[Tensor]) -> Tensor:
        if self._loop.mean:
            parts = [part / (self._passes + self._reduced) for part in parts]
        stack = torch.stack(parts).detach()
        if self._loop.op == "Min":
            return stack.amin(0)
        return stack.sum(0) if self._loop.op == "Sum" else stack.mean(0)

    def _step(self, form: str) -> None:
        if form == "closure":
            self._backward([True] * self._ranks, False, "plain")
        self._reduce()
        if form.startswith("clip"):
            torch.nn.utils.clip_grad_norm_(self._net.parameters(), CLIP)
        if form == "timeout_drop":  # nothing is said of what has been stepped
            self._build()
            return
        self._optimizer.step()
        self._reset()
        parameters = list(self._net.parameters())
        state: State = [p.detach().numpy().copy() for p in parameters]
        state += [None if p.grad is None else p.grad.numpy().copy() for p in parameters]
        self._seen.append(state)


def difference(loop: Loop, got: list[State], right: list[State]) -> str:
    """What is wrong with a rank's states; empty: nothing."""
    names = [name for name, _ in Net(0, loop.width).named_parameters()]
    names += [f"{name}.grad" for name in names]
    if len(got) != len(right):
        return f"{len(got)} steps instead of {len(right)}"
    for step, (ours, theirs) in enumerate(zip(got, right, strict=True)):
        for name, x, y in zip(names, ours, theirs, strict=True):
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
