# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors: their rows are gathered instead of summed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farandole.ops import Average, Sum
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.exchange import allgather_async

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sum or average of sparse COO tensors of one shape; ranks may hold no element at all.

    Returns a function that waits and gives a coalesced sparse tensor. Raises ValueError for dense
    tensors and other operations.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be summed or averaged only")
    local = tensor.detach().coalesce()  # duplicates would travel in vain
    indices = allgather_async(local.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(local.values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        rows = values.wait()
        if op == Average:
            rows = rows / (process_set.size() or 1)
        parts = (indices.wait().t(), rows, local.shape)
        return torch.sparse_coo_tensor(*parts, check_invariants=False).coalesce()

    return wait
