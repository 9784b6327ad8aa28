# SPDX-License-Identifier: Apache-2.0
"""Learning rates of many ranks: the linear scaling rule with warm-up, and a check for equality."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from farandole.calls.door import collective_then
from farandole.calls.requests import Op
from farandole.errors import MismatchError
from farandole.objects import allgather_object
from farandole.process_sets import ProcessSet, global_process_set

__all__ = ["check_learning_rate", "linear_warmup"]


def linear_warmup(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    scale: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> LambdaLR:
    """A scheduler from the learning rate of one rank to `scale` times it (Goyal et al., 2017).

    The factor grows evenly from 1 to `scale`, by default the number of ranks, over `warmup_steps`
    calls of the scheduler's step(), and stays. Set the optimizer's lr for one rank's batch. Chain
    it with others by torch.optim.lr_scheduler.SequentialLR. Raises ValueError for negative steps.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is 0 at least, not {warmup_steps}")
    full = float(process_set.size() or 1) if scale is None else scale

    def factor(step: int) -> float:
        return full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps

    return LambdaLR(optimizer, factor)


@collective_then(Op.ALLGATHER, unnamed="check_learning_rate")
def check_learning_rate(
    optimizer: torch.optim.Optimizer, process_set: ProcessSet = global_process_set
) -> Callable[[], None]:
    """Raises MismatchError on all ranks, naming ranks and values, where learning rates differ.

    Collective; cheap enough for once an epoch. Raises TypeError on all ranks for what is no
    optimizer on one.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}: pass an optimizer of torch"
        )
    own = tuple(float(group["lr"]) for group in optimizer.param_groups)
    return lambda: _compare(own, process_set)


def _compare(own: tuple[float, ...], process_set: ProcessSet) -> None:
    holders: dict[tuple[float, ...], list[int]] = {}
    told = allgather_object(own, name="check_learning_rate", process_set=process_set)
    for rank, rates in enumerate(told):
        holders.setdefault(rates, []).append(rank)
    if len(holders) > 1:
        differing = (
            f"{', '.join(map(str, rates))} on rank{'s'[: len(ranks) > 1]} "
            + ", ".join(map(str, ranks))
            for rates, ranks in holders.items()
        )
        raise MismatchError(f"ranks have different learning rates: {'; '.join(differing)}")
