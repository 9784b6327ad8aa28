# SPDX-License-Identifier: Apache-2.0
"""Names of a DistributedOptimizer's parameters, the same on all ranks. Used when it is made or gets
parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def default_name(group: int, index: int) -> str:
    """The name of an unnamed parameter, which no module uses."""
    return f"group[{group}][{index}]"


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[str]:
    """The names of all parameters, in the order of the groups; without names, their numbers.

    Raises ValueError if named_parameters are not (name, tensor) tuples, repeat a name, or lack a
    parameter of the optimizer.
    """
    if named_parameters is None:
        return [
            default_name(number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, _ in enumerate(group["params"])
        ]
    if isinstance(named_parameters, Tensor) or not isinstance(named_parameters, Iterable):
        raise TypeError(
            f"named_parameters is of type {type(named_parameters).__name__}: pass "
            "model.named_parameters()"
        )
    pairs: list[Any] = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters holds (name, tensor) tuples: model.named_parameters()")
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"named_parameters repeats names: {', '.join(repeated)}")
    by_id = {id(tensor): str(name) for name, tensor in pairs}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [tuple(p.shape) for p in parameters if id(p) not in by_id]
    if missing:
        raise ValueError(f"named_parameters lacks parameters of these shapes: {missing}")
    return [by_id[id(p)] for p in parameters]
