# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients are sent in a shorter form, by any class with these two methods. For
users, and for the calls and optimizers that take one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from farandole.compression import Cast, Identity
from farandole.torch.kind import check

if TYPE_CHECKING:
    from farandole.calls.requests import Call
    from farandole.torch.gradients.encoding import Sending


class Compressor(Protocol):
    """The two methods, usually static ones of a class."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, equal in shape and dtype on all ranks, and what decompress needs."""

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its original form."""


class Sender(ABC):
    """What `compression` takes as well as Compressors: it sends gradients by its own Sending."""

    @abstractmethod
    def takes(self, parameter: Tensor) -> bool:
        """Whether it sends this parameter's gradients, or they go uncompressed; equal on all
        ranks."""

    @abstractmethod
    def check(self, name: str, op: int, views: bool, grouped: bool) -> None:
        """Raises ValueError, with the parameter's name, if it does not work with another option."""

    @abstractmethod
    def sending(self, call: Call, parameter: Tensor, state: dict[str, Tensor]) -> Sending:
        """Makes what sends a parameter's gradients, among several ranks. `call` is that of the
        plain form; `state` is what is kept from step to step, changed in place."""


AnyCompressor = Compressor | Sender
# One compressor for all parameters, or a function (name, parameter) -> compressor.
Choice = AnyCompressor | Callable[[str, Tensor], AnyCompressor]


def _shortens(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > dtype.itemsize


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    check(tensor)  # torch's cast would read beyond a storage that was shrunk
    return tensor.to(dtype)


class _Extra:
    """A member that an extra package brings, imported when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, _: object, _type: type) -> Any:
        return getattr(import_module("farandole.torch"), self._name)


class Compression:
    """The compressors that come with farandole.

    none, fp16 and bf16 work with all calls. topk(), powersgd(), int8() and onebit() make
    compressors with error feedback, for DistributedOptimizer.
    """

    none = Identity
    fp16 = Cast(torch.float16, _shortens, _cast)
    bf16 = Cast(torch.bfloat16, _shortens, _cast)
    topk = _Extra("TopK")
    powersgd = _Extra("PowerSGD")
    int8 = _Extra("Int8")
    onebit = _Extra("OneBit")


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


def chooser(choice: Choice) -> Callable[[str, Tensor], AnyCompressor]:
    """The function form of a choice; none for what a compressor with error feedback leaves alone.

    The user's function is asked once for each parameter. Raises TypeError for any other value.
    """
    if isinstance(choice, Sender):
        compressor = choice
        return lambda name, parameter: _taken(compressor, name, parameter)
    if isinstance(choice, type) and issubclass(choice, Sender):
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
    if not isinstance(compressor, Sender):
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
