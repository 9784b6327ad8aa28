# SPDX-License-Identifier: Apache-2.0
"""Weights of ranks, for DistributedOptimizer.set_weight(): they make an average a weighted one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from farandole import ops
from farandole.calls.arguments import number, shown
from farandole.members import ProcessSet


def factor_of(weight: Any, averages: bool, name: str, process_set: ProcessSet) -> float:
    """The factor for this rank's tensors that makes their average the weighted one.

    Collective, by `name`. `weight`: a number, or an array or tensor of one element, of any dtype on
    each rank. `averages`: whether an average will be taken. Raises ValueError on all ranks if one's
    weight is negative or not finite, or all are 0, or no average is taken.
    """
    mine = number(weight)
    usable = averages and mine is not None and math.isfinite(mine) and mine >= 0
    total = np.array([mine if usable else math.nan], np.float64)
    ops.allreduce_(total, op=ops.Sum, name=name, process_set=process_set)
    if not averages:
        raise ValueError("set_weight() goes with op=Average only")
    if not 0 < total[0] < math.inf:
        raise ValueError(
            f"set_weight(weight): weight is {shown(weight)}, of type {type(weight).__name__}, on "
            "this rank; weights are finite, 0 or more on all ranks, and more on one at least"
        )
    assert mine is not None
    return float(mine * (process_set.size() or 1) / total[0])
