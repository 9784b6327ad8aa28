# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients are sent in a shorter form, by any class with these two methods. For
users, and for the calls and optimizers that take one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from farandole.compression import Cast, Identity
from farandole.ops import Average, Sum
from farandole.torch.feedback.compressor import FeedbackCompressor
from farandole.torch.feedback.compressors import Int8, OneBit, PowerSGD, TopK
from farandole.torch.kind import check


class Compressor(Protocol):
    """The two methods, usually static ones of a class."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, equal in shape and dtype on all ranks, and what decompress needs."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""


AnyCompressor = Compressor | FeedbackCompressor
# One compressor for all parameters, or a function (name, parameter) -> compressor.
Choice = AnyCompressor | Callable[[str, Tensor], AnyCompressor]


def _shortens(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > dtype.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    check(tensor)  # torch's cast would read beyond a storage that was shrunk
    return tensor.to(dtype)


class Compression:
    """The compressors that come with farandole.

    none, fp16 and bf16 go with all calls. topk(), powersgd(), int8() and onebit() make compressors
    with error feedback, for DistributedOptimizer.
    """

    none = Identity
    fp16 = Cast(torch.float16, _shortens, _cast)
    bf16 = Cast(torch.bfloat16, _shortens, _cast)
    topk = TopK
    powersgd = PowerSGD
    int8 = Int8
    onebit = OneBit


def compressed(
    compression: Compressor,
    tensors: Sequence[Tensor],
    reduce: Callable[[list[Tensor]], list[Tensor]],
) -> Callable[[], list[Tensor]]:
    """Compresses tensors. Returns a function that reduces them, and restores the results' form."""
    wires = [_compress(compression, x) for x in tensors]

    def meet() -> list[Tensor]:
        results = zip(reduce([wire for wire, _ in wires]), wires, strict=True)
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
    wire = compressor.compress(tensor)
    if not isinstance(wire, tuple) or len(wire) != 2:
        raise TypeError(
            f"compression is {compressor!r}, whose compress() gives "
            f"{type(wire).__name__}: it gives (tensor to send, what decompress needs)"
        )
    return wire


def chooser(choice: Choice) -> Callable[[str, Tensor], AnyCompressor]:
    """The function form of a choice; none for what a compressor with error feedback leaves alone.

    The user's function is asked once for each parameter. Raises TypeError for any other value.
    """
    if isinstance(choice, FeedbackCompressor):
        compressor = choice
        return lambda name, parameter: _taken(compressor, name, parameter)
    if isinstance(choice, type) and issubclass(choice, FeedbackCompressor):
        raise TypeError(
            f"compression is the class {choice.__name__}: pass an object, as {choice.__name__}()"
        )
    if hasattr(choice, "compress") and hasattr(choice, "decompress"):
        plain = choice
        return lambda name, parameter: plain
    if callable(choice):
        chosen = cast("Callable[[str, Tensor], AnyCompressor]", choice)
        return cache(lambda name, parameter: _taken(chosen(name, parameter), name, parameter))
    raise TypeError(
        f"compression is {choice!r}, of type {type(choice).__name__}: pass a class with "
        "compress and decompress, a FeedbackCompressor, or a function (name, parameter) -> one"
    )


def _taken(compressor: AnyCompressor, name: str, parameter: Tensor) -> AnyCompressor:
    if not isinstance(compressor, FeedbackCompressor):
        if hasattr(compressor, "compress") and hasattr(compressor, "decompress"):
            return compressor
        raise TypeError(
            f"compression gives {compressor!r} for parameter {name}: a class with compress and "
            "decompress, or an object that is a FeedbackCompressor"
        )
    if parameter.is_complex():
        raise TypeError(f"parameter {name} is {parameter.dtype}: {compressor!r} takes real ones")
    real = parameter.is_floating_point()
    return compressor if real and compressor.takes(parameter) else Compression.none


def check_feedback(
    chosen: AnyCompressor, name: str, op: int, in_buckets: bool = False, grouped: bool = False
) -> None:
    """Raises ValueError if error feedback does not go with the op or another option."""
    if not isinstance(chosen, FeedbackCompressor):
        return
    if op not in (Average, Sum):
        raise ValueError(
            f"parameter {name}: {chosen!r} goes with op=Average and Sum only: what it has lost of "
            "one gradient is added to the next, which is right for sums"
        )
    if in_buckets or grouped:
        what = "gradient_as_bucket_view" if in_buckets else "groups"
        raise ValueError(
            f"parameter {name}: {chosen!r} does not go with {what}: what is sent is not the "
            "gradient itself; let compression= choose Compression.none for it"
        )
