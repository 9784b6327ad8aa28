# SPDX-License-Identifier: Apache-2.0
"""Collectives as autograd functions: how any of them becomes differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farandole.calls.requests import count_unnamed
from farandole.process_sets import ProcessSet, set_id

__all__ = ["differentiable"]

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# From the results' gradients, and the name of the collective that reduces them.
Gradient = Callable[[Sequence[Tensor], str], Sequence[Tensor]]

_NAMES = 1024  # unnamed calls whose backward passes may be under way at once


def differentiable(
    operation: str,
    name: str | None,
    process_set: ProcessSet,
    tensors: Sequence[Tensor],
    run: Run,
    gradient: Gradient,
) -> list[Tensor]:
    """`run(tensors)`, whose backward pass is `gradient`.

    Where `gradient` itself is differentiable, second derivatives work.
    """
    wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
    # What torch.func makes can't be sent. `run` says so on all ranks, apply() would on this one.
    if wanted and not torch._C._are_functorch_transforms_active():
        apply: Callable[..., tuple[Tensor, ...]] = _Collective.apply
        back = _gradient_name(operation, name, process_set)
        return list(apply(run, partial(_apart, gradient, back), *tensors))
    return list(run(tensors))


def _gradient_name(operation: str, name: str | None, process_set: ProcessSet) -> str:
    """The name of a call's backward collective, equal on all ranks.

    That of an unnamed call comes from its place in their order. A name is needed, since backward
    passes on a GPU run on a thread of their own.
    """
    if name is not None:
        return f"{name}.gradient"
    return f"{operation}.gradient.{count_unnamed(set_id(process_set)) % _NAMES}"


def _apart(gradient: Gradient, back: str, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    return gradient(gradients, back)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, gradient: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(gradients))
