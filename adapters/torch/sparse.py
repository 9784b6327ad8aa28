# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors: their rows are gathered instead of summed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from farandole.handles import Handle
from farandole.ops import Average, Sum
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.exchange import allgather_async
from farandole.torch.reductions import allreduce

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
    *,
    density_threshold: float | None = None,
) -> Callable[[], Tensor]:
    """Sum or average of sparse COO tensors of one shape; ranks may hold no element at all.

    Returns a function that waits and gives a coalesced sparse tensor. Elements are gathered. With a
    `density_threshold` they travel as a dense tensor instead where the ranks' elements, counted
    together, are more than this share of those that the tensor has room for. All ranks learn the
    counts from the gathered indices; values then travel when the function is called, not before.
    Raises ValueError for dense tensors and other operations.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be summed or averaged only")
    local = tensor.detach().coalesce()  # duplicates would travel in vain
    share = math.inf if density_threshold is None else density_threshold
    most = share * math.prod(local.shape[: local.sparse_dim()])
    indices = allgather_async(local.indices().t().contiguous(), f"{name}.indices", process_set)
    values: Handle[Tensor] | None = None
    if density_threshold is None:
        values = allgather_async(local.values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        nonlocal values
        everyones = indices.wait()
        if len(everyones) > most:
            total = allreduce(
                local.to_dense(), name=f"{name}.dense", op=op, process_set=process_set
            )
            return total.to_sparse(local.sparse_dim())
        if values is None:
            values = allgather_async(local.values().contiguous(), f"{name}.values", process_set)
        rows = values.wait()
        if op == Average:
            rows = rows / (process_set.size() or 1)
        parts = (everyones.t(), rows, local.shape)
        return torch.sparse_coo_tensor(*parts, check_invariants=False).coalesce()

    return wait
