# SPDX-License-Identifier: Apache-2.0
"""What a DistributedOptimizer is given, checked: parameters' names and groups. Used when it is
made, or gets parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farandole.equality import Interval
from farandole.errors import warn
from farandole.members import ProcessSet
from farandole.ops import Average
from farandole.torch.compression import Compressor

Groups = int | Sequence[Sequence[Tensor]] | None


@dataclass(frozen=True)
class Settings:
    """The settings of all gradients of one optimizer."""

    process_set: int
    reduce_op: int
    prescale: float
    postscale: float
    compressor: Compressor
    sparse_as_dense: bool
    groups: dict[int, int]  # parameter's id -> the number of its group
    views: bool  # gradient_as_bucket_view
    ranks: ProcessSet  # that of process_set
    verify: Interval  # of comparisons of the ranks' models

    @property
    def is_linear(self) -> bool:
        """True if what was added to a step's last result can be reduced with it."""
        return self.reduce_op == Average


# ---- names


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


# ---- groups


def assign(parameters: Sequence[Tensor], groups: Groups, num_groups: int) -> dict[int, int]:
    """Each grouped parameter's id -> the number of its group; others are reduced alone.

    A number splits the parameters that require a gradient into that many groups of neighbours; 0
    and None mean no groups. `num_groups` is a deprecated form of a number. Raises ValueError for
    negative numbers, and for lists with a parameter twice, or with anything else in them.
    """
    if num_groups:
        warn("num_groups is deprecated: use groups", DeprecationWarning)
        groups = num_groups if groups is None else groups
    if groups is None:
        return {}
    members = _members(parameters, groups)
    return {id(parameter): number for number, group in enumerate(members) for parameter in group}


def _members(
    parameters: Sequence[Tensor], groups: int | Sequence[Sequence[Tensor]]
) -> Sequence[Sequence[Tensor]]:
    if not isinstance(groups, (int, list, tuple)):
        raise TypeError(
            f"groups is {groups!r}, of type {type(groups).__name__}: pass a number of groups, or a "
            "list of lists of parameters"
        )
    if not isinstance(groups, int):
        return _checked(parameters, groups)
    if groups < 0:
        raise ValueError(f"groups is a number of groups, 0 for none, not {groups}")
    return _split([p for p in parameters if p.requires_grad], groups)


def _split(parameters: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Divides neighbours into `count` groups whose sizes differ by at most one."""
    count = min(count, len(parameters))
    ends = [len(parameters) * (i + 1) // count for i in range(count)]
    return [parameters[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _checked(
    parameters: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]
) -> Sequence[Sequence[Tensor]]:
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups is a number, or a list of lists of parameters")
    free = {id(p) for p in parameters}
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, Tensor) or id(parameter) not in free:
            raise ValueError(
                "groups hold parameters of the optimizer, each once at most; not "
                f"{tuple(parameter.shape) if isinstance(parameter, Tensor) else parameter!r}"
            )
        free.remove(id(parameter))
    return groups
