# SPDX-License-Identifier: Apache-2.0
"""all_reduce of a sparse tensor: all elements are gathered, and added up by each rank. Used by
calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farandole.errors import MismatchError

__all__ = ["elements_of", "sum_into"]


def elements_of(x: Tensor) -> list[Tensor]:
    """What a rank sends of a sparse COO tensor: shape, indices and values, all by rows."""
    own = x.detach().coalesce()
    shape = torch.tensor([own.shape], device=own.device)
    return [shape, own.indices().t().contiguous(), own.values().contiguous()]


def sum_into(x: Tensor, label: str, divisor: int) -> Callable[[Any], None]:
    """What writes to `x` the sum of all ranks' elements, divided."""

    def finish(received: Any) -> None:
        shapes, indices, values = (rows for rows, _ in received)
        if any(shape != list(x.shape) for shape in shapes.tolist()):
            raise MismatchError(f"all_reduce in {label}: ranks have shapes {shapes.tolist()}")
        parts = indices.t(), values / divisor if divisor > 1 else values, x.shape
        x.copy_(torch.sparse_coo_tensor(*parts, check_invariants=False).coalesce())

    return finish
