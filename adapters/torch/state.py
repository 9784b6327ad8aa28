# SPDX-License-Identifier: Apache-2.0
"""Splits an optimizer's state into tensors and a picklable skeleton, and rebuilds it elsewhere.

broadcast_optimizer_state() uses this to send the state to other ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farandole.torch import strides
from farandole.torch.kind import check, check_unused


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor in a skeleton."""

    number: int  # the tensor's index in the list of tensors


@dataclass(frozen=True)
class Shape:
    """The form of a tensor. Other ranks need it to allocate the tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool  # False if the tensor is on the parameter's device


@dataclass(frozen=True)
class Skeleton:
    """State and options of an optimizer, with references in place of tensors.

    Parameters are numbered through all groups.
    """

    counts: list[int]  # number of parameters in each group
    options: list[dict[str, Any]]  # each group's options, without "params"
    # Pairs of (parameter's number, value), and of ((key,), value) for state of no parameter.
    state: list[tuple[Any, Any]]
    shapes: list[Shape]
    owners: list[int]  # number of each tensor's parameter, or 0 if the tensor belongs to none


def skeleton_of(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> Skeleton:
    """Returns the optimizer's skeleton. Appends each of the optimizer's tensors to `tensors` once.

    If a tensor cannot be sent, raises TypeError or ValueError with the name of the tensor's entry.
    """
    numbers = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    refs: dict[int, TensorRef] = {}
    owners: list[int] = []

    def strip(value: Any, owner: int) -> Any:
        def ref_to(x: Tensor) -> TensorRef:
            if id(x) not in refs:
                refs[id(x)] = TensorRef(len(tensors))
                tensors.append(x.detach())
                owners.append(owner)
            return refs[id(x)]

        return map_nested(value, Tensor, ref_to)

    state = []
    for key, value in optimizer.state.items():
        number = numbers.get(id(key))
        _check(f"state of parameter {number}", value)
        state.append(((key,) if number is None else number, strip(value, number or 0)))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for i, group in enumerate(groups):
        _check(f"group {i}", group)
    options = [strip(group, 0) for group in groups]
    shapes = [
        Shape(tuple(x.shape), strides.of_state(x), x.dtype, x.device.type == "cpu") for x in tensors
    ]
    counts = [len(g["params"]) for g in optimizer.param_groups]
    return Skeleton(counts, options, state, shapes, owners)


def describe_tensors(skeleton: Skeleton, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns uninitialised tensors, one for each tensor that the skeleton refers to."""
    parameters = _parameters(optimizer)

    def make(shape: Shape, owner: Tensor) -> Tensor:
        own = strides.of_state(owner) if shape.sizes == owner.shape else shape.strides
        device = "cpu" if shape.on_cpu else owner.device
        return torch.empty_strided(shape.sizes, own, dtype=shape.dtype, device=device)

    pairs = zip(skeleton.shapes, skeleton.owners, strict=True)
    return [make(shape, parameters[owner]) for shape, owner in pairs]


def apply(skeleton: Skeleton, tensors: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Replaces the optimizer's state and options. Keeps the dict objects of the groups."""

    def fill(value: Any) -> Any:
        return map_nested(value, TensorRef, lambda ref: tensors[ref.number])

    parameters = _parameters(optimizer)
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in skeleton.state:
        state[parameters[key] if isinstance(key, int) else key[0]] = fill(value)
    optimizer.state = state
    for group, options in zip(optimizer.param_groups, skeleton.options, strict=True):
        for stale in group.keys() - options.keys() - {"params"}:
            del group[stale]
        group.update(fill(options))


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Gives state tensors the strides that torch's optimizers use.

    A loaded tensor may have other strides. Changes only tensors that have their parameter's shape.
    """

    def laid_out(x: Tensor, parameter: Tensor) -> Tensor:
        alike = x.layout is torch.strided and x.shape == parameter.shape
        return strides.laid_out(x, strides.of_state(parameter)) if alike else x

    for key, value in optimizer.state.items():
        if isinstance(key, Tensor):
            optimizer.state[key] = map_nested(value, Tensor, partial(laid_out, parameter=key))


def map_nested(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to each object of class `kind` in nested dicts, lists and tuples."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps its class
        for key, member in value.items():
            made[key] = map_nested(member, kind, change)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(v, kind, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_nested(v, kind, change) for v in value)
    return value


def _check(where: str, value: Any) -> None:
    """Raises an error with the entry's path if `value` contains a tensor that cannot be sent."""
    if isinstance(value, dict):
        for key, member in value.items():
            _check(f"{where}, {key!r}", member)
        return

    def check_one(x: Tensor) -> None:
        check(x)
        check_unused(x)

    try:
        map_nested(value, Tensor, check_one)
    except (TypeError, ValueError) as reason:
        raise type(reason)(f"the optimizer's {where}: {reason}") from reason


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
