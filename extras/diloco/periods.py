# SPDX-License-Identifier: Apache-2.0
"""What a DiLoCo does on one rank: checks of what it is given and of what the ranks have told, outer
gradients, the outer step. On the thread that steps; nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farandole import MismatchError
from farandole.extension import ranks_text
from farandole.torch.extension import describe, without_grad

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element

Named = dict[str, Tensor]


def checked(params: Any, outer: torch.optim.Optimizer | None) -> tuple[Named, Named]:
    """The parameters that train, by name, and the frozen ones. TypeError and ValueError for wrong
    ones, and for an outer optimizer of others."""
    if isinstance(params, (Tensor, str, Mapping)) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is of type {type(params).__name__}: pass model.parameters() or "
            "model.named_parameters()"
        )
    named: Named = {}
    for i, x in enumerate(params):
        name, p = x if isinstance(x, tuple) and len(x) == 2 else (f"parameter {i}", x)
        if not isinstance(p, Tensor) or not p.is_leaf:
            raise TypeError(f"params, {name}: a {type(p).__name__} is not a parameter of a model")
        if name in named or any(p is other for other in named.values()):
            raise ValueError(f"params holds {name} twice")
        named[name] = p
    training = {name: p for name, p in named.items() if p.requires_grad}
    if not training:
        raise ValueError("params holds no parameter that requires a gradient")
    for name, p in training.items():
        try:
            describe(p.detach())
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"params, {name}: {reason}") from reason
    if outer is not None:
        _check_outer(outer, training)
    return training, {name: p for name, p in named.items() if not p.requires_grad}


def _check_outer(outer: torch.optim.Optimizer, training: Named) -> None:
    if not isinstance(outer, torch.optim.Optimizer):
        raise TypeError(
            f"outer_optimizer is of type {type(outer).__name__}: pass an optimizer of torch.optim "
            "over the same parameters, or None"
        )
    if hasattr(outer, "synchronize"):
        raise ValueError(
            "outer_optimizer is a DistributedOptimizer: pass a plain one, for outer gradients are "
            "reduced already"
        )
    held = {id(p) for group in outer.param_groups for p in group["params"]}
    if lacking := [name for name, p in training.items() if id(p) not in held]:
        raise ValueError(
            f"outer_optimizer lacks {', '.join(lacking[:4])}: make it of the same parameters"
        )


def check_state(state: Mapping[str, Any], params: Named, outer: bool) -> None:
    """Raises ValueError for a state_dict() of another DiLoCo."""
    common = state["common"]
    if {name: x.shape for name, x in common.items()} != {k: p.shape for k, p in params.items()}:
        raise ValueError(
            f"the state is of other parameters: of {', '.join(common)}; these are "
            f"{', '.join(params)}"
        )
    if bool(state["outer"]) != outer:
        raise ValueError(
            f"the state was saved {'without' if outer else 'with'} an outer optimizer: make the "
            "DiLoCo the same way"
        )


def agree_on_making(what: str, ranks: Sequence[int], told: Sequence[dict[str, str]]) -> None:
    """Raises MismatchError if the ranks, which have told options and parameters, differ."""
    for rank, theirs in zip(ranks, told, strict=True):
        for key in [*told[0], *theirs]:
            if (one := told[0].get(key, "none")) != (other := theirs.get(key, "none")):
                raise MismatchError(
                    f"{what}: {key} is {one} on rank {ranks[0]} and {other} on rank {rank}: make "
                    "it alike on all ranks, of the same parameters"
                )
        if list(theirs) != list(told[0]):
            raise MismatchError(
                f"{what}: ranks {ranks[0]} and {rank} have the parameters in different orders: "
                "pass model.parameters() on all ranks"
            )


def agree_on_place(
    what: str, ranks: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[int]]
) -> None:
    """Raises MismatchError if a rank is missing, or is not where the others are.

    A row has a rank's place in the set, its steps, its outer steps, and checksums of the common
    parameters.
    """
    if gone := set(range(len(ranks))) - {row[0] for row in rows}:
        raise MismatchError(
            f"{what}: {ranks_text(ranks[i] for i in gone)} joined (hvd.join()), and an average "
            "needs all: all ranks make equally many steps with DiLoCo"
        )
    fields = ("steps", "outer steps", *(f"the common {name}" for name in names))
    for row in rows[1:]:
        for i, (field, one, other) in enumerate(zip(fields, rows[0][1:], row[1:], strict=True)):
            if one != other:
                numbers = f" ({one} and {other})" if i < 2 else ""
                raise MismatchError(
                    f"{what}: ranks {ranks[rows[0][0]]} and {ranks[row[0]]} differ in {field}"
                    f"{numbers}: do all load the same checkpoint, call step() equally often, and "
                    "give the outer optimizer the same options?"
                )


def checksum(x: Tensor) -> int:
    """A number that tells apart tensors with other bits, nearly always."""
    words = _WORDS.get(x.element_size(), torch.int64)
    return int(x.contiguous().reshape(-1).view(torch.uint8).view(words).sum(dtype=torch.int64))


@without_grad
def difference_of(name: str, p: Tensor, common: Tensor) -> Tensor:
    """The outer gradient of a parameter: the common values minus its own; contiguous, new.

    Raises ValueError if the parameter has been converted since the common values were kept.
    """
    if (p.dtype, p.device) != (common.dtype, common.device):
        raise ValueError(
            f"{name} was {common.dtype} on {common.device} when the DiLoCo was made, and is "
            f"{p.dtype} on {p.device}: convert the model (model.half(), model.to()) before DiLoCo"
        )
    return torch.sub(common, p).contiguous()


@without_grad
def outer_step(
    params: Named,
    common: Sequence[Tensor],
    grads: Sequence[Tensor],
    outer: torch.optim.Optimizer | None,
) -> None:
    """Steps from the common values, and makes the result the parameters' and the new common values.

    Without `outer` the gradients are subtracted. `.grad` is kept.
    """
    pairs = list(zip(params.values(), common, strict=True))
    for p, x in pairs:
        p.copy_(x)
    if outer is None:
        for (p, _), grad in zip(pairs, grads, strict=True):
            p.sub_(grad.reshape(p.shape))
    else:
        held = [(p, p.grad) for group in outer.param_groups for p in group["params"]]
        try:
            for p, _ in held:
                p.grad = None
            for (p, _), grad in zip(pairs, grads, strict=True):
                p.grad = grad
            outer.step()
        finally:
            for p, grad_before in held:
                p.grad = grad_before
    for p, x in pairs:
        x.copy_(p)
