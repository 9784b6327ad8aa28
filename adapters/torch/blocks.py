# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes for files, and back. For commits and checkpoints, on the thread that saves or
loads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from farandole.commits import digest
from farandole.torch.kind import check
from farandole.trees import Flat


def held(x: Tensor, path: str) -> Tensor:
    """The tensor as a file holds it: contiguous, on the CPU, perhaps over the same memory.

    Raises TypeError or ValueError, with the path, for one that no file holds.
    """
    try:
        check(x)
        if x.dtype is torch.complex128:
            raise TypeError("safetensors does not support complex128: save torch.view_as_real(x)")
    except (TypeError, ValueError) as reason:
        raise type(reason)(f"state, {path}: {reason}") from reason
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def as_block(x: Tensor) -> tuple[str, tuple[int, ...], Flat]:
    """The dtype's name, the shape and the bytes of a tensor that is held()."""
    flat = np.empty(0, np.uint8)
    if x.numel():  # x.numpy() would forbid storage.resize_() for good
        flat = np.from_dlpack(x.reshape(-1).view(torch.uint8)).view(np.uint8)
    return str(x.dtype).removeprefix("torch."), tuple(x.shape), flat


def of_block(dtype: str, shape: tuple[int, ...], flat: Flat) -> Tensor:
    """The inverse of as_block(), over the same memory; on the CPU."""
    known: torch.dtype = getattr(torch, dtype)
    if not flat.size:
        return torch.empty(shape, dtype=known)
    return torch.from_numpy(flat).view(known).reshape(shape)


def digest_of(x: Tensor) -> str:
    """The digest that farandole.commits.digest() makes, of a tensor that is held()."""
    return digest(*as_block(x))
