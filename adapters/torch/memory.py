# SPDX-License-Identifier: Apache-2.0
"""farandole.torch.empty(): tensors in memory that all ranks of a host map, so collectives on them
copy nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.arrays import arena


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Makes a tensor on the CPU, uninitialised, in memory that the other ranks of this host map.

    size: numbers or one sequence; dtype: any of torch's, default torch.get_default_dtype(). Not
    collective: each rank calls it for any number of tensors; whole pages are allocated, so prefer
    few large ones. The tensor and its views behave as any other; clones, deep copies and pickles
    are ordinary tensors. In a forked child it shows what the parent has there until the child
    writes to it; the parent does not see those writes. Raises LibraryError where memory is short.

    Examples:
        >>> hvd.allreduce_(hvd.empty(2, 3).fill_(1.0)).sum()
        tensor(6.)
    """
    sizes: Any = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    shape = torch.Size(sizes)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = torch.from_numpy(arena.allocate(shape.numel() * dtype.itemsize))
    return memory.view(dtype).view(shape)
