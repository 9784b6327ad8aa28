# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients travel in a shorter form. Any class with the two methods will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole.torch.kind import check

__all__ = ["Choice", "Compression", "Compressor", "chooser"]


class Compressor(Protocol):
    """The two methods, usually static ones of a class."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, equal in shape and dtype on all ranks, and what decompress needs."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""


# One compressor for all parameters, or a function (name, parameter) -> compressor.
Choice = Compressor | Callable[[str, Tensor], Compressor]


class _Identity:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Cast:
    """Sends floating-point tensors in a shorter dtype; the sum itself is taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if not tensor.is_floating_point() or tensor.element_size() <= self.dtype.itemsize:
            return tensor, None
        check(tensor)  # torch's cast would read beyond a storage that was made smaller
        return tensor.to(self.dtype), tensor.dtype

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)

    def __repr__(self) -> str:
        return f"Compression({self.dtype})"


class Compression:
    """The compressors that come with farandole."""

    none = _Identity
    fp16 = _Cast(torch.float16)
    bf16 = _Cast(torch.bfloat16)


def chooser(choice: Choice) -> Callable[[str, Tensor], Compressor]:
    """The function form of a choice. Raises TypeError for what is neither."""
    if hasattr(choice, "compress") and hasattr(choice, "decompress"):
        compressor = choice
        return lambda name, parameter: compressor
    if callable(choice):
        return choice
    raise TypeError(
        f"compression is a class with compress and decompress, or a function (name, parameter) -> "
        f"such a class, not {choice!r}"
    )
