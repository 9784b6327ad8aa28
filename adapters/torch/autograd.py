# SPDX-License-Identifier: Apache-2.0
"""Collectives as autograd functions: how any of them becomes differentiable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.process_sets import ProcessSet

__all__ = ["differentiable", "gradient_name"]

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_NAMES = 1024  # unnamed calls whose backward passes may be under way at once
_unnamed: Counter[int | None] = Counter()


def gradient_name(operation: str, name: str | None, process_set: ProcessSet) -> str:
    """The name of a call's backward collective, equal on all ranks.

    Unnamed calls are counted, for they match by their order. A name is needed, since backward
    passes on a GPU run on a thread of their own.
    """
    if name is not None:
        return f"{name}.gradient"
    set_id = process_set.process_set_id
    _unnamed[set_id] += 1
    return f"{operation}.gradient.{_unnamed[set_id] % _NAMES}"


def differentiable(tensors: Sequence[Tensor], run: Run, gradient: Run) -> list[Tensor]:
    """`run(tensors)`, whose backward pass is `gradient`, a function of the results' gradients.

    Where `gradient` itself is differentiable, second derivatives work.
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # What torch.func makes can't be sent. `run` says so on all ranks, apply() would on this one.
    if wanted and not torch._C._are_functorch_transforms_active():
        apply: Callable[..., tuple[Tensor, ...]] = _Collective.apply
        return list(apply(run, gradient, *tensors))
    return list(run(tensors))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, gradient: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(gradients))
