# SPDX-License-Identifier: Apache-2.0
"""Converts tensors to named blocks of bytes and back, for elastic commits. Importing this module
registers the converter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from farandole.torch.kind import check
from farandole.torch.strides import laid_out, of_state
from farandole.trees import CODES, TensorBlock, Tensors, register_torch


class _Tensors(Tensors):
    def block_of(self, x: Tensor, path: str) -> tuple[TensorBlock, list[int] | None]:
        """Returns the tensor's bytes in row-major order, and its strides.

        The strides are those that torch gives to optimizer state, or None for a contiguous tensor.
        """
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
        if x.numel():  # unlike DLPack, x.numpy() forbids storage.resize_() forever
            flat = np.from_dlpack(x.reshape(-1).view(torch.uint8)).view(np.uint8)
        return TensorBlock(name, tuple(x.shape), flat), strides

    def tensor_of(self, block: TensorBlock, strides: list[int] | None) -> Tensor:
        """Returns a tensor that uses the block's memory, or a copy if `strides` are given."""
        dtype: torch.dtype = getattr(torch, block.dtype)
        if not block.flat.size:
            x = torch.empty(block.shape, dtype=dtype, device="cpu")
        else:
            x = torch.from_numpy(block.flat).view(dtype).reshape(block.shape)
        return x if strides is None else laid_out(x, strides)


register_torch(_Tensors())
