# SPDX-License-Identifier: Apache-2.0
"""A rank that runs a training loop with farandole's optimizer and says what it got."""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

import farandole.torch as hvd
from strangers.loop_reference import State
from strangers.loops import CLIP, Loop, Net, batch, loss_of, plain_optimizer, steps
from strangers.memory import Canaries
from strangers.program import Tensor
from strangers.stage import Stage

__all__ = ["LoopRunner"]


class Mistake(Exception):
    """Of the user's own code."""


class Negated:
    """A user's compressor, which loses nothing of a sum."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return -tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, _context: Any) -> torch.Tensor:
        return -tensor


class LoopRunner:
    """One loop on one rank."""

    def __init__(self, loop: Loop, rank: int, ranks: int, stage: Stage) -> None:
        self._loop, self._rank, self._ranks, self._stage = loop, rank, ranks, stage
        self._built = self._number = 0
        self._canaries = Canaries()
        self.found: list[tuple[Any, ...]] = []  # ("state", arrays) or ("wrong", text)

    def run(self) -> None:
        """The whole loop."""
        self._build()
        for place, (word, *arguments) in enumerate(steps(self._loop)):
            self._stage.now(f"{place} {word} {arguments}")
            getattr(self, f"_{word}")(*arguments)
        self._look()

    def after_shutdown(self) -> None:
        """Nothing may have been written by then either."""
        self._look()

    def _build(self) -> None:
        self._net = Net(self._built, self._loop)
        named = list(self._net.named_parameters())
        parts = [named[:2], named[2:]] if self._loop.kind == "split" else [named]
        with self._stage.blocked():
            self._optimizers: list[Any] = [self._distributed(part) for part in parts]
        self._built += 1

    def _distributed(self, named: list[tuple[str, Any]]) -> Any:
        loop = self._loop
        options: dict[str, Any] = {"gradient_as_bucket_view": loop.views}
        if loop.kind == "compressed" and loop.op != "Min":
            options |= {"compression": Negated}
        return hvd.DistributedOptimizer(
            plain_optimizer(loop, [p for _, p in named]),
            named if loop.named else None,
            backward_passes_per_step=loop.passes,
            op=getattr(hvd, loop.op),
            sparse_as_dense=loop.dense,
            **options,
        )

    # ---- moves

    def _backward(self, used: list[bool], hold: bool, form: str) -> None:
        x = batch(self._rank, self._number)
        self._number += 1
        own = used[self._rank % len(used)]
        with ExitStack() as stack:
            for optimizer in self._optimizers if hold else []:
                stack.enter_context(optimizer.no_sync())
            stack.enter_context(self._stage.blocked())
            loss_of(self._net, x, own, form).backward()

    def _zero(self, form: str) -> None:
        for whose in self._optimizers if form.startswith("optimizer") else [self._net]:
            whose.zero_grad(set_to_none=form.endswith("none"))

    def _step(self, form: str) -> None:
        with self._stage.blocked():
            if form == "clip":
                self._synchronize()
                torch.nn.utils.clip_grad_norm_(self._net.parameters(), CLIP)
            for optimizer in self._optimizers:
                optimizer.step(*([self._closure] if form == "closure" else []))
        self._tell()

    def _synchronize(self) -> None:
        for optimizer in self._optimizers:
            optimizer.synchronize()

    def _closure(self) -> Any:
        self._zero("optimizer_none")
        loss = loss_of(self._net, batch(self._rank, self._number), True)
        self._number += 1
        loss.backward()
        return loss

    def _raise(self, then: str) -> None:
        try:
            raise Mistake
        except Mistake:
            if then == "drop":
                self._rebuild(True)
            elif then == "zero":
                self._zero("optimizer_none")

    def _rebuild(self, collect: bool) -> None:
        del self._optimizers, self._net
        if collect:
            gc.collect()
        self._build()

    def _edit(self) -> None:
        with self._stage.blocked():
            self._synchronize()
        for p in self._net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def _copy(self) -> None:
        """A copy is plain: it trains by itself and disturbs nobody."""
        net = copy.deepcopy(self._net)
        optimizer = plain_optimizer(self._loop, list(net.parameters()))
        loss_of(net, batch(self._rank, 77), True).backward()
        optimizer.step()

    def _broadcast(self, root: int) -> None:
        with self._stage.blocked():
            hvd.broadcast_parameters(self._net.state_dict(), root % self._ranks)
            for optimizer in self._optimizers:
                hvd.broadcast_optimizer_state(optimizer, root % self._ranks)

    def _late(self, rank: int) -> None:
        if rank % self._ranks == self._rank:
            self._stage.come_last()

    def _memory(self, count: int, keep: bool) -> None:
        for p in self._net.parameters():
            t = Tensor(dtype="float64", shape=tuple(p.shape))
            self._canaries.add(t, self._rank, count, keep, "like a gradient")

    # ---- what is seen

    def _tell(self) -> None:
        parameters = list(self._net.parameters())
        state: State = [p.detach().numpy().copy() for p in parameters]
        grads = [p.grad for p in parameters]
        state += [None if g is None else np.array(g.to_dense().numpy()) for g in grads]
        self.found.append(("state", state))

    def _look(self) -> None:
        for text in self._canaries.changed():
            self.found.append(("wrong", text))
