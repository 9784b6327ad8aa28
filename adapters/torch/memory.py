# SPDX-License-Identifier: Apache-2.0
"""farandole.torch.empty() creates tensors in memory that all ranks of a host map.

Collectives use such tensors without copying them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farandole.arrays import arena


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialised CPU tensor in memory that the other ranks of this host map.

    - size: the shape, either as separate integers or as one sequence of integers.
    - dtype: any torch dtype. The default is torch.get_default_dtype().

    This is not a collective: each rank may call it as often as it likes. It allocates whole pages,
    so prefer a few large tensors. The tensor and its views behave like any other tensor. Clones,
    deep copies and pickles are ordinary tensors. A forked child sees the parent's values until the
    child writes to the tensor. The parent never sees the child's writes. Raises LibraryError if
    memory is short.

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
