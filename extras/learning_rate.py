# SPDX-License-Identifier: Apache-2.0
"""Learning rates: the linear scaling rule with warm-up, and a check that all ranks' are equal.
Public calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from farandole import MismatchError, ProcessSet, allgather_object, global_process_set
from farandole.extension import Op, collective_then, ranks_text


def linear_warmup(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    scale: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> LambdaLR:
    """A scheduler from the learning rate of one rank to `scale` times it (Goyal et al., 2017).

    The factor grows linearly from 1 to `scale`, by default the number of ranks of `process_set`,
    over `warmup_steps` calls of the scheduler's step(), then stays. Set the optimizer's lr for one
    rank's batch. Chain it with others by torch.optim.lr_scheduler.SequentialLR. Raises ValueError
    for negative steps.

    Examples:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> scheduler = hvd.linear_warmup(optimizer, warmup_steps=100, scale=4.0)
        >>> scheduler.get_last_lr()
        [0.1]
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, not {warmup_steps}")
    full = float(process_set.size() or 1) if scale is None else scale

    def factor(step: int) -> float:
        return full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps

    return LambdaLR(optimizer, factor)


@collective_then(Op.ALLGATHER, unnamed="check_learning_rate")
def check_learning_rate(
    optimizer: torch.optim.Optimizer, process_set: ProcessSet = global_process_set
) -> Callable[[], None]:
    """Raises MismatchError on all ranks, naming ranks and values, if learning rates differ.

    Collective; cheap enough for each epoch. Raises TypeError on all ranks if one passes something
    other than an optimizer.

    Examples:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
        >>> hvd.check_learning_rate(optimizer)
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
            f"{', '.join(map(str, rates))} on {ranks_text(ranks)}"
            for rates, ranks in holders.items()
        )
        raise MismatchError(f"ranks have different learning rates: {'; '.join(differing)}")
