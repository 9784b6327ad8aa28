# SPDX-License-Identifier: Apache-2.0
"""farandole.torch.empty(): tensors in memory that all ranks of a host map. Collectives use them
without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.arrays import arena


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor on the CPU, in memory that the other ranks of this host map.

    - size: integers, or one sequence of integers.
    - dtype: any dtype of torch; default: torch.get_default_dtype().

    Not collective: each rank may call this as often as it likes. It allocates whole pages, so
    prefer few large tensors. The tensor and its views behave like any other tensor; clones, deep
    copies and pickles are ordinary tensors. A forked child sees the parent's values until the child
    writes; the parent never sees the child's writes. Raises LibraryError if memory is short.

    Examples:
        >>> hvd.allreduce_(hvd.empty(2, 3).fill_(1.0)).sum()
        tensor(6.)
    """
    sizes: Any = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    shape = torch.Size(sizes)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = torch.from_numpy(arena.allocate(shape.numel() * dtype.itemsize))
    return memory.view(dtype).view(shape)
