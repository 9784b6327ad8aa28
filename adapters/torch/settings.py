# SPDX-License-Identifier: Apache-2.0
"""How the gradients of one optimizer are reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from farandole.torch.compression import Compressor

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What all gradients of one optimizer have in common."""

    process_set: int
    reduce_op: int
    prescale: float
    postscale: float
    compressor_of: Callable[[str, Tensor], Compressor]
    sparse_as_dense: bool
    groups: dict[int, tuple[int, int]]  # parameter's id -> (group, its number of members)
