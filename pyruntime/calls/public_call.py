# SPDX-License-Identifier: Apache-2.0
"""The decorators of all public collectives. They turn an error on one rank into an error on all
ranks. Decorated functions may be called from any thread.

If a function raises an error before the core takes its call, the decorator reports the error to the
peers under the name by which they know the call. The peers then also fail instead of waiting.
`collective` decorates functions that submit a call; `waiting` decorates functions that call such a
function and wait. Both look up each parameter in the table of arguments when the function is
defined, so a new function cannot have an unchecked parameter. Neither changes a function's
signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from farandole.calls import part
from farandole.calls.arguments import ARGUMENTS, shown, wrong
from farandole.calls.handles import Handle
from farandole.calls.requests import Call, Op, is_told, refuse_all, told
from farandole.calls.sites import begin, end
from farandole.errors import without_frames
from farandole.members import denoted, global_process_set

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class _Then(NamedTuple):
    meet: Callable[[], Any]


def then(meet: Callable[[], R]) -> R:
    """A collective that makes several calls or waits returns then(meet). The collective's decorator
    calls `meet` and returns what `meet` returns. The calls in `meet` report their own errors.
    """
    return cast("R", _Then(meet))


def collective(
    op: Op,
    first: str = "{}",
    unnamed: str | None = None,
    tell: Callable[[list[Call], Exception], None] = refuse_all,
    calls: Callable[[dict[str, Any]], list[Call]] | None = None,
) -> Callable[[F], F]:
    """Decorates a function so that its errors are reported to the peers. The function must either
    submit one call and do nothing afterwards that could fail, or submit no call and return
    then(...).

    `op` is the first operation that the peers submit. `first` is the pattern of that call's name;
    the user's `name` is filled in. `unnamed` is the call's name if the user gives none. If
    `unnamed` is None, unnamed calls match by their order. `tell` reports errors to the peers. Its
    first argument holds every call in which a peer may be waiting. `calls` derives those calls from
    the arguments if `name` does not determine them.
    """

    def decorate(function: F) -> F:
        checks = _Checks(function, op, first, unnamed, tell, calls)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                checks.check(args, kwargs)
                result = function(*args, **kwargs)
            except Exception as reason:
                error = checks.told(reason, args, kwargs)
                error.__cause__ = reason.__cause__
                raise without_frames(error) from error.__cause__
            except BaseException as reason:
                part.end(reason)
                raise
            if type(result) is not _Then:
                return result
            begun = begin(2)
            try:
                return result.meet()
            except Exception as reason:
                raise without_frames(reason)  # noqa: B904  # the same error
            except BaseException as reason:
                part.end(reason)
                raise
            finally:
                if begun:
                    end(begun, None)

        call._checks = checks  # type: ignore[attr-defined]
        return cast("F", call)

    return decorate


def wait_for(handle: Handle[R]) -> R:
    """Functions that wait return wait_for(handle). Their decorator returns the handle's result."""
    return cast("R", handle)


def waiting(
    op: Op, calls: Callable[[dict[str, Any]], list[Call]] | None = None
) -> Callable[[F], F]:
    """Decorates a function that calls a collective and returns wait_for(handle), or the result if
    the call is done. The collective reports its own errors. This decorator reports only arguments
    that do not fit the function's signature."""

    def decorate(function: F) -> F:
        checks = _Checks(function, op, calls=calls)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                made = function(*args, **kwargs)
                return made.wait() if isinstance(made, Handle) else made
            except TypeError as reason:
                if checks.unbound(args, kwargs) is None:
                    raise without_frames(reason)  # noqa: B904  # the same error
                raise checks.told(reason, args, kwargs) from None
            except Exception as reason:
                raise without_frames(reason)  # noqa: B904  # the same error
            except BaseException as reason:
                part.end(reason)
                raise

        call._checks = checks  # type: ignore[attr-defined]
        return cast("F", call)

    return decorate


@contextmanager
def errors_reach_peers(process_set: Any, meeting: str) -> Iterator[None]:
    """Context manager that reports errors to ranks that wait in the allgather named `meeting`."""
    try:
        yield
    except Exception as reason:
        refuse_all([Call(Op.ALLGATHER, meeting, number) for number in denoted(process_set)], reason)
        raise


def is_collective(function: object) -> bool:
    """True if this module checks the arguments of `function` or of a function that it wraps."""
    return hasattr(inspect.unwrap(function, stop=lambda f: hasattr(f, "_checks")), "_checks")  # type: ignore[arg-type]


class _Checks:
    """Checks one function's arguments and reports errors to the peers."""

    def __init__(
        self,
        function: Any,
        op: Op,
        first: str = "{}",
        unnamed: str | None = None,
        tell: Callable[[list[Call], Exception], None] = refuse_all,
        calls: Callable[[dict[str, Any]], list[Call]] | None = None,
    ) -> None:
        # In errors, the function's name appears without `_`, `grouped_` and `_async` around it.
        plain = function.__name__.strip("_").removesuffix("_async")
        self._name = plain.removeprefix("grouped_")
        self._op = op
        self._first = first
        self._unnamed = unnamed
        self._tell = tell
        self._calls = calls or self._named
        self._signature = inspect.signature(function)
        self._order = list(self._signature.parameters)
        unknown = [name for name in self._order if name not in ARGUMENTS]
        if unknown:
            raise TypeError(
                f"{self._name}: give {', '.join(unknown)} a row in farandole.calls.arguments"
            )
        self._about_sets = op in (Op.ADD_SET, Op.REMOVE_SET)  # such calls are made in process set 0
        self._faults = {name: ARGUMENTS[name].fault for name in self._order}
        if self._about_sets:
            self._faults = {name: lambda _: None for name in self._order}
        self._in_order = [self._faults[name] for name in self._order]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises the error for the first wrong argument. Returns if arguments do not fit the
        signature, because the function itself raises TypeError in that case."""
        for i, value in enumerate(args):
            if i == len(self._in_order):
                return
            fault = self._in_order[i](value)
            if fault is not None:
                raise wrong(self._order[i], value, ARGUMENTS[self._order[i]], fault)
        for name, value in kwargs.items():
            check = self._faults.get(name)
            if check is None:
                return
            fault = check(value)
            if fault is not None:
                raise wrong(name, value, ARGUMENTS[name], fault)

    def unbound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError | None:
        """Returns the error for arguments that do not fit the signature, or None if all of them
        fit."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as reason:
            return TypeError(f"{reason}; the arguments are {', '.join(self._order)}")
        return None

    def told(self, reason: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
        """Reports an error to the peers and returns the exception that this rank must raise."""
        if is_told(reason):
            return reason
        if isinstance(reason, TypeError):
            reason = self.unbound(args, kwargs) or reason
        given = dict(zip(self._order, args, strict=False)) | kwargs
        name = given.get("name")
        said = self._name if name is None else f"{self._name} {shown(name)}"
        if type(reason) in (TypeError, ValueError, NotImplementedError):
            reason = type(reason)(f"{said}: {reason}").with_traceback(reason.__traceback__)
        calls = self._calls(given)
        if calls:
            self._tell(calls, reason)
        return told(reason)

    def _named(self, given: dict[str, Any]) -> list[Call]:
        """Returns the calls in which peers may be waiting. The list is empty if this rank's `name`
        is invalid, because the name that the peers use is then unknown."""
        name = given.get("name")
        if isinstance(name, (bytes, bytearray)):
            name = name.decode(errors="replace")
        if ARGUMENTS["name"].fault(name) is not None:
            return []
        first = self._unnamed if name is None else self._first.format(name)
        where = 0 if self._about_sets else given.get("process_set", global_process_set)
        return [Call(self._op, first, number) for number in denoted(where)]
