# SPDX-License-Identifier: Apache-2.0
"""The settings of one DistributedOptimizer, for its Reducer, and which go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from farandole.ops import Adasum, Average
from farandole.torch.compression import AnyCompressor


@dataclass(frozen=True)
class Settings:
    """The settings of all gradients of one optimizer."""

    process_set: int
    reduce_op: int
    prescale: float
    postscale: float
    compressor_of: Callable[[str, Tensor], AnyCompressor]
    sparse_as_dense: bool
    groups: dict[int, tuple[int, int]]  # parameter's id -> (group, its number of members)
    complete_after_backward: bool


def check_options(
    op: int, predivide: float, accumulate: str, views: bool, complete: bool, shard_state: bool | str
) -> None:
    """Raises ValueError for options that do not go together."""
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    if accumulate not in ("sum", "mean"):
        raise ValueError(f"accumulate is 'sum' or 'mean', not {accumulate!r}")
    if shard_state not in (False, True, "elementwise"):
        raise ValueError(f"shard_state is True, False or 'elementwise', not {shard_state!r}")
    if op == Adasum and views:
        raise ValueError("gradient_as_bucket_view does not go with Adasum: steps are combined")
    if op == Adasum and complete:
        raise ValueError("complete_after_backward does not go with Adasum: steps are combined")
    if op == Adasum and shard_state:
        raise ValueError("shard_state does not go with Adasum: each rank makes a step of its own")
    if views and shard_state:
        raise ValueError("gradient_as_bucket_view does not go with shard_state: no rank keeps them")
