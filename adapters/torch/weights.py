# SPDX-License-Identifier: Apache-2.0
"""Weights of ranks: how an average becomes a weighted one."""

from __future__ import annotations

import math

import numpy as np

from farandole import ops
from farandole.process_sets import ProcessSet

__all__ = ["factor_of"]


def factor_of(weight: float, averages: bool, name: str, process_set: ProcessSet) -> float:
    """What this rank's tensors are multiplied by, so that their average is the weighted one.

    Collective, by `name`. `averages`: whether an average will be taken. Raises ValueError on all
    ranks where one's weight is negative or not finite, or all are 0, or no average is taken.
    """
    usable = averages and math.isfinite(weight) and weight >= 0
    total = np.array([weight if usable else math.nan])
    ops.allreduce_(total, op=ops.Sum, name=name, process_set=process_set)
    if not averages:
        raise ValueError("set_weight() goes with op=Average only")
    if not total[0] > 0:
        raise ValueError(
            f"set_weight({weight}): weights are 0 or more on all ranks, and more on one at least"
        )
    return float(weight * (process_set.size() or 1) / total[0])
