# SPDX-License-Identifier: Apache-2.0
"""Makes collectives differentiable. Backward passes run on autograd's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.calls.requests import count_unnamed
from farandole.members import ProcessSet, set_id
from farandole.ops import Average, Sum

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# Maps the gradients of the results to the gradients of the inputs. The second argument is the name
# of the collective that reduces the gradients.
Gradient = Callable[[Sequence[Tensor], str], Sequence[Tensor]]

_NAMES = 1024  # names that the backward collectives of unnamed calls use in rotation


def differentiable(
    operation: str,
    name: str | None,
    process_set: ProcessSet,
    tensors: Sequence[Tensor],
    run: Run,
    gradient: Gradient,
    op: int = Sum,
) -> list[Tensor]:
    """Returns the results of `run(tensors)`, with `gradient` as their backward pass.

    Second derivatives work if `gradient` is itself differentiable. The backward pass raises
    NotImplementedError unless `op`, the call's reduction, is Average or Sum.
    """

    def checked(gradients: Sequence[Tensor], back: str) -> Sequence[Tensor]:
        if op not in (Average, Sum):
            raise NotImplementedError(f"{operation} is differentiable for Average and Sum only")
        return gradient(gradients, back)

    wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
    # Tensors of torch.func's transforms cannot be sent. For them, `run` raises an error on all
    # ranks, whereas apply() would raise an error on this rank only.
    if wanted and not torch._C._are_functorch_transforms_active():
        apply: Callable[..., tuple[Tensor, ...]] = _Collective.apply
        back = _gradient_name(operation, name, process_set)
        return list(apply(run, lambda gs: checked(gs, back), *tensors))
    return list(run(tensors))


def _gradient_name(operation: str, name: str | None, process_set: ProcessSet) -> str:
    """Returns the name of a call's backward collective. The name is equal on all ranks.

    The collective needs a name, because backward passes on a GPU run on another thread. If the call
    has no name, the collective's name contains the call's number.
    """
    if name is not None:
        return f"{name}.gradient"
    return f"{operation}.gradient.{count_unnamed(set_id(process_set)) % _NAMES}"


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, gradient: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(gradients))
