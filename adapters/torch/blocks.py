# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch as named blocks of bytes, for commits, on the thread that writes or reads.
Importing this module registers it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from farandole.torch.kind import check
from farandole.torch.strides import laid_out, of_state
from farandole.trees import CODES, Block, Tensors, register_torch


class _Tensors(Tensors):
    def block_of(self, x: Tensor, path: str) -> tuple[Block, list[int] | None]:
        """The strides are those of torch's optimizer state."""
        try:
            check(x)
            if x.dtype is torch.complex128:
                raise TypeError(
                    "safetensors does not support complex128: save torch.view_as_real(x)"
                )
        except (TypeError, ValueError) as reason:
            raise type(reason)(f"state, {path}: {reason}") from reason
        name = str(x.dtype).removeprefix("torch.")
        if name not in CODES:
            raise TypeError(f"state, {path}: safetensors has no {name}")
        strides = None if x.is_contiguous() else [*of_state(x)]
        x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = np.empty(0, np.uint8)
        if x.numel():  # x.numpy() would forbid storage.resize_() for good
            flat = np.from_dlpack(x.reshape(-1).view(torch.uint8)).view(np.uint8)
        return Block(name, tuple(x.shape), flat), strides

    def tensor_of(self, block: Block, strides: list[int] | None) -> Tensor:
        """A copy if it is not contiguous."""
        dtype: torch.dtype = getattr(torch, block.dtype)
        if not block.flat.size:
            x = torch.empty(block.shape, dtype=dtype)
        else:
            x = torch.from_numpy(block.flat).view(dtype).reshape(block.shape)
        return x if strides is None else laid_out(x, strides)


register_torch(_Tensors())
