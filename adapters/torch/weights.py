# SPDX-License-Identifier: Apache-2.0
"""Weights of ranks: how an average becomes a weighted one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from farandole import ops
from farandole.calls.arguments import number, shown
from farandole.process_sets import ProcessSet

__all__ = ["factor_of"]


def factor_of(weight: Any, averages: bool, name: str, process_set: ProcessSet) -> float:
    """What this rank's tensors are multiplied by, so that their average is the weighted one.

    Collective, by `name`. `weight`: a number, or an array or tensor of one element, of any dtype on
    each rank. `averages`: whether an average will be taken. Raises ValueError on all ranks where
    one's weight is negative or no finite number, or all are 0, or no average is taken.
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
