# SPDX-License-Identifier: Apache-2.0
"""A rank that runs a training loop with farandole's optimizer and says what it got."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

import farandole as fd
import farandole.torch as hvd
from strangers.interrupts import TIMEOUT, interrupted_soon
from strangers.loop_reference import State
from strangers.loops import CLIP, Loop, Net, batch, loss_of, plain_optimizer, steps
from strangers.memory import Canaries
from strangers.program import Tensor
from strangers.stage import Stage

__all__ = ["LoopRunner"]


class Mistake(Exception):
    """Of the user's own code."""


class LoopRunner:
    """One loop on one rank."""

    def __init__(self, loop: Loop, rank: int, ranks: int, stage: Stage) -> None:
        self._loop, self._rank, self._ranks, self._stage = loop, rank, ranks, stage
        self._built = self._number = 0
        self._canaries = Canaries()
        self._reset = False  # model.zero_grad(): the next pass ends what is under way
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
        loop = self._loop
        self._net = Net(self._built, loop.width)
        self._optimizer: Any = hvd.DistributedOptimizer(
            plain_optimizer(loop, self._net),
            self._net.named_parameters() if loop.named else None,
            backward_passes_per_step=loop.passes,
            op=getattr(hvd, loop.op),
            num_groups=loop.groups,
            accumulate="mean" if loop.mean else "sum",
            gradient_as_bucket_view=loop.views,
        )
        self._built += 1

    # ---- moves

    def _backward(self, used: list[bool], hold: bool, form: str) -> None:
        x = batch(self._rank, self._number)
        self._number += 1
        own = used[self._rank % len(used)]
        held = self._optimizer.no_sync() if hold else nullcontext()
        ends = self._stage.blocked() if self._reset else nullcontext()
        self._reset = False
        with held, ends:
            loss_of(self._net, x, own, form).backward()

    def _zero(self, form: str) -> None:
        whose = self._optimizer if form.startswith("optimizer") else self._net
        self._reset = whose is self._net
        with self._stage.blocked():
            whose.zero_grad(set_to_none=form.endswith("none"))

    def _step(self, form: str, ranks: list[bool]) -> None:
        own = bool(ranks) and ranks[self._rank % len(ranks)]
        if form.startswith("timeout") and own:
            self._lose_patience(gives_up=form == "timeout_drop")
        elif form == "interrupt" and own:
            self._interrupted()
        else:
            self._whole_step(form)
        if form == "timeout_drop":
            self._rebuild(True)
        else:
            self._tell()

    def _whole_step(self, form: str) -> None:
        with self._stage.blocked():
            if form == "clip":
                self._optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(self._net.parameters(), CLIP)
            elif form == "clip_own":
                self._optimizer.clip_grad_norm_(CLIP)
            if form == "closure":
                self._optimizer.step(self._closure)
            else:
                self._optimizer.step()

    def _closure(self) -> Any:
        self._optimizer.zero_grad()
        loss = loss_of(self._net, batch(self._rank, self._number), True)
        self._number += 1
        loss.backward()
        return loss

    def _lose_patience(self, gives_up: bool) -> None:
        """A step with a limit, which is made again unless this rank drops everything."""
        try:
            self._optimizer.step(timeout=TIMEOUT)
        except fd.StallError:
            if not gives_up:
                with self._stage.blocked():
                    self._optimizer.step()

    def _interrupted(self) -> None:
        try:
            with interrupted_soon():
                self._optimizer.synchronize()
        except KeyboardInterrupt:
            pass
        with self._stage.blocked():
            self._optimizer.step()

    def _raise(self, then: str) -> None:
        try:
            raise Mistake
        except Mistake:
            if then == "drop":
                self._rebuild(True)
            elif then == "zero":
                self._zero("optimizer_none")

    def _rebuild(self, collect: bool) -> None:
        del self._optimizer, self._net
        if collect:
            gc.collect()
        self._build()

    def _edit(self) -> None:
        with self._stage.blocked():
            self._optimizer.synchronize()
        for p in self._net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def _copy(self) -> None:
        """A copy is plain: it trains by itself and disturbs nobody."""
        net = copy.deepcopy(self._net)
        optimizer = plain_optimizer(self._loop, net)
        loss_of(net, batch(self._rank, 77), True).backward()
        optimizer.step()

    def _broadcast(self, root: int) -> None:
        with self._stage.blocked():
            hvd.broadcast_parameters(self._net.state_dict(), root % self._ranks)
            hvd.broadcast_optimizer_state(self._optimizer, root % self._ranks)

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
        state += [None if p.grad is None else np.array(p.grad.numpy()) for p in parameters]
        self.found.append(("state", state))

    def _look(self) -> None:
        for text in self._canaries.changed():
            self.found.append(("wrong", text))
