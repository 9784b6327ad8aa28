# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors: their rows are gathered instead of summed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from farandole.handles import Handle
from farandole.ops import Average, Max, Sum
from farandole.process_sets import ProcessSet, global_process_set
from farandole.torch.exchange import allgather_async
from farandole.torch.reductions import allreduce, allreduce_async_

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
    Raises ValueError for dense tensors and other operations; when waiting, where shapes differ.
    """
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async takes a sparse COO tensor, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be summed or averaged only")
    local = tensor.detach().coalesce()  # duplicates would travel in vain
    agree = _agreement(local, name, process_set)
    share = math.inf if density_threshold is None else density_threshold
    most = share * math.prod(local.shape[: local.sparse_dim()])
    indices = allgather_async(local.indices().t().contiguous(), f"{name}.indices", process_set)
    values: Handle[Tensor] | None = None
    if density_threshold is None:
        values = allgather_async(local.values().contiguous(), f"{name}.values", process_set)

    def wait() -> Tensor:
        nonlocal values
        try:
            everyones = indices.wait()
            if values is not None:
                values.wait()
        finally:  # so that nothing is left under way
            agree()
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


def _agreement(local: Tensor, name: str, process_set: ProcessSet) -> Callable[[], None]:
    """Waits for all ranks' shapes: an index may lie far beyond a smaller tensor.

    What is gathered does not tell them. Raises ValueError on all ranks where they differ.
    """
    shape = torch.tensor([*local.shape, *(-n for n in local.shape)])
    extremes = allreduce_async_(shape, None, f"{name}.shape", Max, process_set=process_set)

    def wait() -> None:
        most, least = extremes.wait().view(2, -1)
        if not torch.equal(most, -least):
            raise ValueError(
                f"sparse_allreduce_async {name!r}: ranks have different shapes, between "
                f"{tuple((-least).tolist())} and {tuple(most.tolist())}; here {tuple(local.shape)}"
            )

    return wait
