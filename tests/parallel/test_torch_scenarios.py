# SPDX-License-Identifier: Apache-2.0
"""What all ranks do with an optimizer, move by move, in several modes; a judge in plain numbers
says what `.grad` and the parameters hold on each rank.

A move is a backward pass, or a word with the names of parameters. `p0 q1@0` is a pass that adds
value(rank, 0) to p.grad on all ranks and value(rank, 1) to q.grad on rank 0; who adds nothing
calls synchronize(). After a move that begins with `?` nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import farandole.torch as hvd
from harness.toys import grad_is, push_each, value

NAMES = "pqrs"  # s is in no optimizer before `group s`
MODES: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "views": {"gradient_as_bucket_view": True},
    "half": {"compression": hvd.Compression.fp16},
    "groups": {"groups": 1},
}
RESETS = ("zero", "zero0", "model", "model0")  # 0: to zeros in place of None
# Those with a + reduce a gradient onto what was reduced before, which a sum can not tell apart.
MOVES = {
    "unused on all ranks": "p0; step; zero; p1 q0; step",
    "missing on some ranks": "p0 q1@0; step; zero; q2@last; step",
    "each pass adds": "+; q0; p0; p1; p2; step; zero; p1; p2; step",
    "without zero_grad": "+; p0 q0; step; p1; step; p2; step",
    "nothing is reduced twice": "p0; sync; sync; skew p; step",
    "no_sync": "hold p0 q0; hold p1; p2; step",
    "a window that is not full": "passes 4; p0; p1; step; zero; p0; p1; p2; p3; step",
    "another number of passes": "p0; step; zero; passes 2; p1; p2; step; zero; passes 1; p3; step",
    "by hand": "p0; step; hand p0 q1; step; hand p1 q2; step; hand p2 q3; step",
    "frozen and thawed": "off q; p0; step; zero; on q; p0 q1; step; zero; off q; p2; step",
    "frozen within a window": "passes 2; p1 q0; off q; p2; step",
    "frozen after no_sync": "hold p1 q0; off q; p2; step",
    "frozen with a gradient by hand": "off q; hand q0; p2; step",
    "frozen at construction": "on f; ?f0; step; zero; f1 p0; step",  # noticed in step()
    "a new group": "group s; p0 s1; step; zero; s2@last; step",
    **{
        f"{reset} between passes": f"+; p0 q0@0; {reset}; p0; step; {reset}; p1; step"
        for reset in RESETS
    },
}


class Judge:
    """Numbers by rank and parameter."""

    def __init__(self, average: bool) -> None:
        self.grads: list[dict[str, float | None]] = [{} for _ in range(hvd.size())]
        self.values = [dict.fromkeys(f"{NAMES}f", 0.0) for _ in range(hvd.size())]
        self._average, self._reduced, self._counted = average, set[str](), 0
        self.frozen, self.passes = set[str](), 1

    def add(self, name: str, k: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.grads[rank][name] = (self.grads[rank].get(name) or 0.0) + value(rank, k)
        self._reduced.discard(name)

    def ended(self, hold: bool) -> None:
        """A backward pass has ended."""
        self._counted += not hold
        if not hold and self._counted >= self.passes:
            self.reduce(self.frozen)

    def reduce(self, but: Iterable[str] = ()) -> None:
        for name in {*self.values[0]} - self._reduced - {*but}:
            parts = [own.get(name) for own in self.grads]
            if any(part is not None for part in parts):
                total = sum(part or 0.0 for part in parts)
                for own in self.grads:
                    own[name] = total / hvd.size() if self._average else total
                self._reduced.add(name)
        self._counted = 0

    def step(self) -> None:
        self.reduce()
        for own, values in zip(self.grads, self.values, strict=True):
            for name, grad in own.items():
                values[name] -= grad or 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        self._reduced.clear()
        self._counted = 0


class Rank:
    """This rank's parameters, and the judge, who follows them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.ps = {name: nn.Parameter(torch.zeros(4)) for name in f"{NAMES}f"}
        self.ps["f"].requires_grad_(False)
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([self.ps[name] for name in "pqrf"], lr=1.0), **options
        )
        self.judge = Judge(options.get("op", hvd.Average) == hvd.Average)

    def move(self, text: str) -> None:
        word, *rest = text.split()
        if hasattr(self, f"_{word}"):
            getattr(self, f"_{word}")(rest)
        elif word in RESETS:
            self._reset(word)
        else:
            self._pass([word, *rest], hold=False)

    def compare(self, stepped: bool) -> None:
        for name, p in self.ps.items():
            if stepped:
                assert p.tolist() == [self.judge.values[hvd.rank()][name]] * 4, name
            if stepped or name not in self.judge.frozen:
                grad_is(p, self.judge.grads[hvd.rank()].get(name))

    def _pass(self, items: list[str], hold: bool) -> None:
        mine = []
        for item in items:
            (name, k), who = item[:2], item[3:]
            ranks = {"0": [0], "last": [hvd.size() - 1]}.get(who, [*range(hvd.size())])
            self.judge.add(name, int(k), ranks)
            mine += [(self.ps[name], int(k))] * (hvd.rank() in ranks)
        with self.optimizer.no_sync() if hold else nullcontext():
            push_each(*mine) if mine else self.optimizer.synchronize()
        self.judge.ended(hold)

    def _hold(self, items: list[str]) -> None:
        self._pass(items, hold=True)

    def _hand(self, items: list[str]) -> None:
        for name, k in items:
            for own in self.judge.grads:
                own[name] = None
            self.judge.add(name, int(k), range(hvd.size()))
            self.ps[name].grad = torch.full((4,), value(hvd.rank(), int(k)))

    def _skew(self, names: list[str]) -> None:
        """Nobody watches what a program does with gradients that have been reduced."""
        for rank, own in enumerate(self.judge.grads):
            own.update({name: (own[name] or 0.0) * (0.5 if rank else 2.0) for name in names})
        for name in names:
            self.ps[name].grad.mul_(0.5 if hvd.rank() else 2.0)  # type: ignore[union-attr]

    def _reset(self, word: str) -> None:
        none, optimizer = not word.endswith("0"), word.startswith("zero")
        whose: Any = self.optimizer if optimizer else nn.ParameterDict(self.ps)
        whose.zero_grad(set_to_none=none)
        for own in self.judge.grads:
            own.update({k: None if none or g is None else 0.0 for k, g in own.items()})
        if optimizer:
            self.judge.begin_anew()

    def _sync(self, _: list[str]) -> None:
        self.optimizer.synchronize()
        self.judge.reduce()

    def _step(self, _: list[str]) -> None:
        self.optimizer.step()
        self.judge.step()

    def _passes(self, number: list[str]) -> None:
        self.judge.passes = int(number[0])
        self.optimizer.set_backward_passes_per_step(self.judge.passes)
        assert self.optimizer.backward_passes_per_step == self.judge.passes

    def _off(self, names: list[str], on: bool = False) -> None:
        for name in names:
            self.ps[name].requires_grad_(on)
            (self.judge.frozen.discard if on else self.judge.frozen.add)(name)

    def _on(self, names: list[str]) -> None:
        self._off(names, on=True)

    def _group(self, names: list[str]) -> None:
        self.optimizer.add_param_group({"params": [self.ps[name] for name in names]})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", MOVES)
def test_scenario(scenario: str, mode: str) -> None:
    first, *moves = MOVES[scenario].split("; ")
    if first == "+" and mode == "sum":
        return
    rank = Rank(MODES[mode])
    for move in moves if first == "+" else [first, *moves]:
        rank.move(move.lstrip("?"))
        if not move.startswith("?"):
            rank.compare(move == "step")
    rank.optimizer.zero_grad()
