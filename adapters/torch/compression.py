# SPDX-License-Identifier: Apache-2.0
"""Compressors: classes that make gradients shorter before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from farandole.compression import Cast, Identity
from farandole.torch.kind import check, check_unused


class Compressor(Protocol):
    """Any object with these two methods; usually a class with static methods."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send, and a context for decompress().

        The tensor to send must have the same shape and dtype on all ranks.
        """

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Converts a reduced tensor back to the dtype and shape that compress() received."""


def _shortens(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > dtype.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    check(tensor)  # raises if the storage was shrunk; a cast would read beyond its end
    return tensor.to(dtype)


class Compression:
    """farandole's compressors: `none` sends tensors unchanged; fp16 and bf16 cast to 16 bits."""

    none = Identity
    fp16 = Cast(torch.float16, _shortens, _cast)
    bf16 = Cast(torch.bfloat16, _shortens, _cast)


def compressed(
    compression: Compressor,
    tensors: Sequence[Tensor],
    reduce: Callable[[list[Tensor]], list[Tensor]],
) -> Callable[[], list[Tensor]]:
    """Compresses tensors. Returns a function that reduces them and decompresses the results."""
    encoded = [_compress(compression, x) for x in tensors]

    def meet() -> list[Tensor]:
        results = zip(reduce([x for x, _ in encoded]), encoded, strict=True)
        return [compression.decompress(result, context) for result, (_, context) in results]

    return meet


def _compress(compressor: Compressor, tensor: Any) -> tuple[Tensor, Any]:
    """Calls `compressor`. Raises TypeError for an argument or result of a wrong type."""
    if compressor is Compression.none:  # the call itself checks `tensor`
        return tensor, None
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"tensor is of type {type(tensor).__name__}, which {compressor!r} does not compress: "
            "pass a torch tensor, or leave compression out"
        )
    check_unused(tensor)
    encoded = compressor.compress(tensor)
    if not isinstance(encoded, tuple) or len(encoded) != 2:
        raise TypeError(
            f"compress() of {compressor!r} returned {type(encoded).__name__}: return a tuple "
            "(tensor to send, context for decompress)"
        )
    return encoded
