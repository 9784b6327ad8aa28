# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer(groups=): parameters whose gradients are reduced together, all or none. Used
when the optimizer is made."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

Groups = int | Sequence[Sequence[Tensor]] | None


def assign(
    parameters: Sequence[Tensor], groups: Groups, num_groups: int
) -> dict[int, tuple[int, int]]:
    """Each grouped parameter's id -> (group, its number of members); others are reduced alone.

    A number splits the parameters that require a gradient into that many groups of neighbours; 0
    and None mean no groups. `num_groups` is a deprecated form of a number. Raises ValueError for
    negative numbers, and for lists with a parameter twice, or with anything else in them.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return {}
    members = _members(parameters, groups)
    return {
        id(parameter): (number, len(group))
        for number, group in enumerate(members)
        for parameter in group
    }


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
