# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients are sent in a shorter form, by any class with these two methods. For
users, and for the calls and optimizers that take one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole.compression import Cast, Identity
from farandole.torch.kind import check


class Compressor(Protocol):
    """The two methods, usually static ones of a class."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, equal in shape and dtype on all ranks, and what decompress needs."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""


def _shortens(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > dtype.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    check(tensor)  # torch's cast would read beyond a storage that was shrunk
    return tensor.to(dtype)


class Compression:
    """The compressors that come with farandole: unchanged, or cast to 16 bits."""

    none = Identity
    fp16 = Cast(torch.float16, _shortens, _cast)
    bf16 = Cast(torch.bfloat16, _shortens, _cast)


def compressed(
    compression: Compressor,
    tensors: Sequence[Tensor],
    reduce: Callable[[list[Tensor]], list[Tensor]],
) -> Callable[[], list[Tensor]]:
    """Compresses tensors. Returns a function that reduces them, and restores the results' form."""
    encoded = [_compress(compression, x) for x in tensors]

    def meet() -> list[Tensor]:
        results = zip(reduce([x for x, _ in encoded]), encoded, strict=True)
        return [compression.decompress(result, context) for result, (_, context) in results]

    return meet


def _compress(compressor: Compressor, tensor: Any) -> tuple[Tensor, Any]:
    """The result of `compressor` for a tensor. Raises TypeError if either is not a tensor."""
    if compressor is Compression.none:  # anything may be sent unchanged, not tensors only
        return tensor, None
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"tensor is of type {type(tensor).__name__}, which {compressor!r} does not compress: "
            "pass a torch tensor, or leave compression out"
        )
    encoded = compressor.compress(tensor)
    if not isinstance(encoded, tuple) or len(encoded) != 2:
        raise TypeError(
            f"compression is {compressor!r}, whose compress() gives "
            f"{type(encoded).__name__}: it gives (tensor to send, what decompress needs)"
        )
    return encoded
