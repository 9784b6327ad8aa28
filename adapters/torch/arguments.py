# SPDX-License-Identifier: Apache-2.0
"""Checks DistributedOptimizer()'s arguments for names and groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farandole.equality import VerifyPolicy
from farandole.errors import warn
from farandole.members import ProcessSet
from farandole.ops import Average
from farandole.torch.compression import Compressor

Groups = int | Sequence[Sequence[Tensor]] | None


@dataclass(frozen=True)
class Settings:
    """Settings that apply to all gradients of one optimizer."""

    process_set: int
    reduce_op: int
    prescale: float
    postscale: float
    compressor: Compressor
    sparse_as_dense: bool
    views: bool  # gradient_as_bucket_view
    ranks: ProcessSet  # the process set that has the number `process_set`
    verify: VerifyPolicy  # says when ranks compare their models

    @property
    def is_linear(self) -> bool:
        """True if the sum of reduced and new gradients may be reduced again.

        This is possible with an average, which does not change values that are equal on all ranks.
        """
        return self.reduce_op == Average


# ---- names


def default_name(group: int, index: int) -> str:
    """Returns the name of an unnamed parameter. No parameter of a torch.nn module is called so."""
    return f"group[{group}][{index}]"


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[str]:
    """Returns the names of all parameters, in the order of the groups.

    Without named_parameters, a name consists of the numbers of the group and the parameter.

    Raises ValueError if named_parameters holds anything but (name, tensor) tuples, repeats a name,
    or lacks a parameter of the optimizer.
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
        raise ValueError("named_parameters needs (name, tensor) tuples: model.named_parameters()")
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


# ---- groups


def check_groups(parameters: Sequence[Tensor], groups: Groups, num_groups: int) -> None:
    """Checks Horovod's arguments `groups` and `num_groups`, which have no effect: the core fuses
    the gradients that are ready. Raises ValueError for a negative number, for a list that repeats a
    parameter, and for a list with anything but the optimizer's parameters."""
    if num_groups:
        warn("num_groups is deprecated: use groups", DeprecationWarning)
        groups = num_groups if groups is None else groups
    if groups is None:
        return
    if not isinstance(groups, (int, list, tuple)):
        raise TypeError(
            f"groups is {groups!r}, of type {type(groups).__name__}: pass a number of groups, or a "
            "list of lists of parameters"
        )
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups is {groups}: pass a number of groups, or 0 for none")
        return
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups must be a number, or a list of lists of parameters")
    free = {id(p) for p in parameters}
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, Tensor) or id(parameter) not in free:
            raise ValueError(
                "groups must hold the optimizer's parameters, each once; wrong or repeated: "
                f"{tuple(parameter.shape) if isinstance(parameter, Tensor) else parameter!r}"
            )
        free.remove(id(parameter))
