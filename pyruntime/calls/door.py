# SPDX-License-Identifier: Apache-2.0
"""The door through which every collective call goes: an error on one rank is an error on all.

Whatever is raised before the peers have been met is told to them under the name by which they know
the call, so that they fail too instead of waiting. A call is let through by `collective` or by
`collective_then`; both look up each of its parameters in the table of arguments when the call is
defined, so a new call can't forget to have them checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from farandole.calls.arguments import ARGUMENTS, shown, wrong
from farandole.calls.requests import Call, Op, is_told, refuse_all, told
from farandole.members import denoted, global_process_set

__all__ = ["collective", "collective_then", "is_collective"]

P = ParamSpec("P")
R = TypeVar("R")


def collective(
    op: Op, first: str = "{}", unnamed: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of functions that submit one call, and do nothing afterwards that could fail.

    `op` is the first operation that peers meet in; `first` its name, made from the user's `name`;
    `unnamed` its name where the user gives none. None: by its place in the order.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        door = _Door(function, op, first, unnamed)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                door.check(args, kwargs)
                return function(*args, **kwargs)
            except Exception as reason:
                raise door.told(reason, args, kwargs) from reason.__cause__

        call._door = door  # type: ignore[attr-defined]
        return call

    return decorate


def collective_then(
    op: Op,
    first: str = "{}",
    unnamed: str | None = None,
    tell: Callable[[list[Call], Exception], None] = refuse_all,
) -> Callable[[Callable[P, Callable[[], R]]], Callable[P, R]]:
    """Of functions that prepare, and give what is left to do, where peers are met. As `collective`.

    What fails after that is the calls' affair that are made there. `tell` tells the peers; of
    several calls, where it can't be known which of them they make.
    """

    def decorate(prepare: Callable[P, Callable[[], R]]) -> Callable[P, R]:
        door = _Door(prepare, op, first, unnamed, tell)

        @functools.wraps(prepare)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                door.check(args, kwargs)
                meet = prepare(*args, **kwargs)
            except Exception as reason:
                raise door.told(reason, args, kwargs) from reason.__cause__
            return meet()

        signature = inspect.signature(prepare)
        result = str(signature.return_annotation).removeprefix("Callable[[], ").removesuffix("]")
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        call._door = door  # type: ignore[attr-defined]
        return call

    return decorate


def is_collective(function: object) -> bool:
    """Whether a public function, or the one that it is made from, has a door."""
    return hasattr(inspect.unwrap(function, stop=lambda f: hasattr(f, "_door")), "_door")  # type: ignore[arg-type]


class _Door:
    """Checks the arguments of one function, and tells what was wrong."""

    def __init__(
        self,
        function: Any,
        op: Op,
        first: str,
        unnamed: str | None,
        tell: Callable[[list[Call], Exception], None] = refuse_all,
    ) -> None:
        # As a user knows it, whatever form of it was called.
        plain = function.__name__.strip("_").removesuffix("_async")
        self._name = plain.removeprefix("grouped_")
        self._op = op
        self._first = first
        self._unnamed = unnamed
        self._tell = tell
        self._signature = inspect.signature(function)
        self._order = list(self._signature.parameters)
        unknown = [name for name in self._order if name not in ARGUMENTS]
        if unknown:
            raise TypeError(
                f"{self._name}: give {', '.join(unknown)} a row in farandole.calls.arguments"
            )
        self._about_sets = op in (Op.ADD_SET, Op.REMOVE_SET)  # the world makes these calls
        self._faults = {name: ARGUMENTS[name].fault for name in self._order}
        if self._about_sets:
            self._faults = {name: lambda _: None for name in self._order}
        self._in_order = [self._faults[name] for name in self._order]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises what is wrong with the first wrong argument."""
        for i, value in enumerate(args):
            if i == len(self._in_order):
                raise self._unbound(args, kwargs)
            fault = self._in_order[i](value)
            if fault is not None:
                raise wrong(self._order[i], value, ARGUMENTS[self._order[i]], fault)
        for name, value in kwargs.items():
            check = self._faults.get(name)
            if check is None:
                raise self._unbound(args, kwargs)
            fault = check(value)
            if fault is not None:
                raise wrong(name, value, ARGUMENTS[name], fault)

    def _unbound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as reason:
            return TypeError(f"{reason}; the arguments are {', '.join(self._order)}")
        raise AssertionError("unreachable: the arguments do fit")

    def told(self, reason: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
        """The error to raise, when the peers have been told of it."""
        if is_told(reason):
            return reason
        if isinstance(reason, TypeError) and not self._fits(args, kwargs):
            reason = self._unbound(args, kwargs)
        given = dict(zip(self._order, args, strict=False)) | kwargs
        name = given.get("name")
        said = self._name if name is None else f"{self._name} {shown(name)}"
        if type(reason) in (TypeError, ValueError):
            reason = type(reason)(f"{said}: {reason}").with_traceback(reason.__traceback__)
        if isinstance(name, (bytes, bytearray)):
            name = name.decode(errors="replace")
        if ARGUMENTS["name"].fault(name) is None:  # else nobody knows what the peers call it
            first = self._unnamed if name is None else self._first.format(name)
            where = 0 if self._about_sets else given.get("process_set", global_process_set)
            self._tell([Call(self._op, first, number) for number in denoted(where)], reason)
        return told(reason)

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True
