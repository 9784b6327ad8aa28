# SPDX-License-Identifier: Apache-2.0
"""The forms of a public call that is written once, over a list and without waiting: for one array,
and waiting. Used where calls are defined, in the core's modules and in adapters."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from farandole.calls import documents, prepared
from farandole.calls.handles import Handle

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
T_in = TypeVar("T_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)
_again = prepared.again
_MISSING: Any = object()  # stands for a tensor that the caller left out, or passed by name


class OneTensor(Protocol[T_in, P, R_out]):
    """The type of a call for one tensor, which callers may also pass as `tensor=`."""

    def __call__(self, tensor: T_in, *args: P.args, **kwargs: P.kwargs) -> R_out:
        """Makes the call."""
        ...


class AnyTensor(Protocol[P]):
    """The same, of a call that takes arrays of all kinds and returns a handle."""

    def __call__(self, tensor: T, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Makes the call."""
        ...


class AnyTensorWaits(Protocol[P]):
    """The same, of a call that waits."""

    def __call__(self, tensor: T, *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes the call."""
        ...


def single(
    start: Callable[Concatenate[Sequence[T], P], Handle[list[T]]],
) -> OneTensor[T, P, Handle[T]]:
    """Makes the form for one array of a `grouped_` function."""

    def call(tensor: T = _MISSING, /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        again = _again(start, tensor, args, kwargs)
        if again is not None:
            return again
        if tensor is _MISSING:
            return by_name(args, kwargs)
        handle = start([tensor], *args, **kwargs)
        if handle.prepared is not None:
            prepared.remember(start, tensor, args, kwargs, handle.prepared)
        return handle.map(lambda results: results[0])

    def by_name(args: Any, kwargs: Any) -> Handle[T]:
        if "tensor" in kwargs:
            return call(kwargs.pop("tensor"), *args, **kwargs)
        given: Callable[..., Handle[T]] = start  # type: ignore[assignment]
        return given(*args, **kwargs)  # raises the error about it

    _document(call, start, "grouped_", "tensor")
    return call  # type: ignore[return-value]  # it takes `tensor=` out of kwargs


def one_of(grouped: Callable[Concatenate[Sequence[T], P], list[R]]) -> OneTensor[T, P, R]:
    """Makes the form for one tensor of a `grouped_` function that waits."""

    def call(tensor: T = _MISSING, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if tensor is _MISSING and "tensor" in kwargs:
            tensor = kwargs.pop("tensor")  # type: ignore[assignment]
        if tensor is _MISSING:
            return grouped(*args, **kwargs)[0]  # type: ignore[arg-type]  # says that it is missing
        (result,) = grouped([tensor], *args, **kwargs)
        return result

    _document(call, grouped, "grouped_", "tensor")
    return call  # type: ignore[return-value]  # it takes `tensor=` out of kwargs


def blocking(start: Callable[P, Handle[R]]) -> Callable[P, R]:
    """Makes the waiting form of an `_async` function."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return start(*args, **kwargs).wait()

    _document(call, start, "_async")
    return call


def single_of_any(
    start: Callable[Concatenate[Sequence[T], P], Handle[list[T]]],
) -> AnyTensor[P]:
    """The same as single() for a function of arrays of all kinds: type checkers lose a T that
    stands in the type of a Protocol."""
    return single(start)  # type: ignore[return-value]


def blocking_of_any(start: AnyTensor[P]) -> AnyTensorWaits[P]:
    """Makes the waiting form of what single_of_any() has made."""
    return blocking(start)


def _document(call: Any, start: Any, less: str, first: str | None = None) -> None:
    """Documents `call` as `start`, its name without `less`, its first argument named `first`."""
    functools.update_wrapper(call, start)
    change = documents.of_waiting if first is None else documents.of_one
    call.__doc__ = change(start.__doc__ or "")
    call.__name__ = call.__qualname__ = start.__name__.replace(less, "")
    signature = inspect.signature(start)
    arguments = list(signature.parameters.values())
    result = str(signature.return_annotation)
    if first is None:
        result = result.removeprefix("Handle[").removesuffix("]")
    else:
        only = inspect.Parameter.POSITIONAL_ONLY
        arguments[0] = arguments[0].replace(name=first, annotation=Any, kind=only)
        result = re.sub(r"list\[(\w+)\]", r"\1", result)
    call.__signature__ = inspect.Signature(arguments, return_annotation=result)
