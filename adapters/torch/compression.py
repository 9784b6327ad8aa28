# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients travel in a shorter form. Any class with the two methods will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole.torch.kind import check

__all__ = ["Choice", "Compression", "Compressor", "chooser", "compressed", "restored"]


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


def restored(
    compression: Compressor, results: Sequence[Tensor], wires: Sequence[tuple[Tensor, Any]]
) -> list[Tensor]:
    """The results of tensors that `compressed` has made, in their original form."""
    pairs = zip(results, wires, strict=True)
    return [compression.decompress(result, context) for result, (_, context) in pairs]


def compressed(compressor: Compressor, tensor: Any) -> tuple[Tensor, Any]:
    """What `compressor` makes of a tensor. Raises TypeError for what is none, and what it gives."""
    if compressor is Compression.none:  # what is sent as it is need be no tensor
        return tensor, None
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"tensor is of type {type(tensor).__name__}, which {compressor!r} does not compress: "
            "pass a torch tensor, or leave compression out"
        )
    wire = compressor.compress(tensor)
    if not isinstance(wire, tuple) or len(wire) != 2:
        raise TypeError(
            f"compression is {compressor!r}, whose compress() gives "
            f"{type(wire).__name__}: it gives (tensor to send, what decompress needs)"
        )
    return wire


def chooser(choice: Choice) -> Callable[[str, Tensor], Compressor]:
    """The function form of a choice. Raises TypeError for what is neither."""
    if hasattr(choice, "compress") and hasattr(choice, "decompress"):
        compressor = choice
        return lambda name, parameter: compressor
    if callable(choice):
        return choice
    raise TypeError(
        f"compression is {choice!r}, of type {type(choice).__name__}: pass a class with "
        "compress and decompress, or a function (name, parameter) -> such a class"
    )
