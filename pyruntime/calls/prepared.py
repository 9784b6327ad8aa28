# SPDX-License-Identifier: Apache-2.0
"""Prepares a call on one array once, for training loops that repeat the call in every step. This
module may be used from any thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeVar, cast

from farandole._library import is_from_core
from farandole.arrays.buffers import EMPTY, Buffer
from farandole.arrays.kinds import kind_of
from farandole.calls import part
from farandole.calls.gpu_handle import GpuHandle
from farandole.calls.handles import OneHandle
from farandole.calls.leases import lend
from farandole.calls.requests import Call, PreparedCall, begin_unnamed, told
from farandole.calls.sites import Site, here
from farandole.members import ProcessSet

_F = TypeVar("_F", bound=Callable[..., Any])
_MISSING: Any = object()
_MOST = 4096  # most calls that a table holds; the oldest are dropped first
# The key is the call's name or all of its arguments. The value holds the positional arguments, the
# keyword arguments and the prepared call.
_Known = dict[Hashable, tuple[Any, Any, "RepeatedCall"]]
_all: list[_Known] = []  # the tables of all decorated functions
_NONE: Any = None, None, None
# Types of arguments whose values cannot change. An array could hold a different factor later.
_LASTING = (type(None), int, float, str, type, ProcessSet)


class _Exactly:
    """A number that equals only numbers of the same type: 1 is a valid rank, but True is not."""

    __slots__ = ("_type", "_value")
    __hash__ = None  # type: ignore[assignment]  # keys hold the user's own values instead

    def __init__(self, value: float) -> None:
        self._type, self._value = type(value), value

    def __eq__(self, other: object) -> bool:
        return type(other) is self._type and other == self._value


def _exactly(value: object) -> object:
    return _Exactly(value) if isinstance(value, (int, float)) else value


def remember(
    known: _Known, key: Hashable, args: Any, kwargs: dict[str, Any], prepared: RepeatedCall
) -> None:
    """Stores a call that has been made once, unless its arguments can change."""
    if not all(isinstance(value, _LASTING) for value in (*args, *kwargs.values())):
        return
    exactly = {name: _exactly(value) for name, value in kwargs.items()}
    try:
        known[key] = tuple(map(_exactly, args)), exactly, prepared
    except TypeError:
        return
    if len(known) > _MOST:
        for old in list(known)[: _MOST // 4]:  # a copy, because other threads may add calls
            known.pop(old, None)


def clear() -> None:
    """Forgets all calls. In a new world, names and process set numbers may mean something else."""
    for known in _all:
        known.clear()


def repeating(function: _F, by_name: bool = True, waits: bool = False) -> _F:
    """Decorates a function that makes a call and returns its handle. When the function is called
    again with equal arguments on an array of the same form, submits a prepared call instead. If
    `by_name`, looks up named calls by their names. If `waits`, the caller waits at once, and a
    repeated call that is already done returns its result instead of a handle."""
    place = list(signature(function).parameters).index("name") - 1  # after the array
    known: _Known = {}
    _all.append(known)

    @wraps(function)
    def call(array: Any = _MISSING, /, *args: Any, **kwargs: Any) -> Any:
        if array is _MISSING:  # the array is passed by name or is missing
            return function(*args, **kwargs)
        key: Any = None
        if by_name:
            key = kwargs.get("name")
            if key is None and len(args) > place:
                key = args[place]
        if key is None:  # an unnamed call is keyed by all arguments and the array's form
            form = getattr(array, "dtype", None), getattr(array, "shape", None)
            key = args, *kwargs.values(), form
        try:
            usual_args, usual_kwargs, prepared = known.get(key, _NONE)
            same = usual_kwargs == kwargs and usual_args == args
        except (TypeError, ValueError):  # an argument has no hash or cannot be compared
            same = False
        if same:
            try:
                made = prepared.start(array, waits=waits)
            except Exception as reason:
                if is_from_core(reason):  # the core has reported a wrong submission to the peers
                    raise told(reason) from None
                raise  # the core may have taken the call, so do not submit it twice
            except BaseException as reason:
                part.end(reason)
                raise
            if made is not None:
                return made
        handle = function(array, *args, **kwargs)
        if (prepared := getattr(handle, "prepared", None)) is not None:
            remember(known, key, args, kwargs, prepared)
        return handle

    return cast("_F", call)


repeating_wait = partial(repeating, waits=True)


class RepeatedCall:
    """A prepared call on arrays of one form. Its result has the same form."""

    __slots__ = (
        "_buffer",
        "_call",
        "_device",
        "_dtype",
        "_in_place",
        "_kind",
        "_lent",
        "_plain",
        "_prepared",
        "_shape",
        "_timeout",
        "_type",
    )

    def __init__(
        self, call: Call, array: Any, buffer: Buffer, in_place: bool, timeout: float | None
    ) -> None:
        """`buffer` describes `array`. This object keeps neither of the two alive."""
        self._call = call  # its text appears in errors
        self._type = type(array)
        self._kind = kind_of(array)
        self._dtype = getattr(array, "dtype", None)
        self._shape = buffer.shape
        # None means the CPU.
        self._device = getattr(array, "device", None) if buffer.device >= 0 else None
        self._buffer = replace(buffer, pointer=EMPTY, owner=None, stream=0)  # only its form
        self._in_place = in_place
        self._timeout = timeout
        self._prepared: dict[str, PreparedCall] = {}  # keyed by the call site's text
        self._lent = self._kind.lent
        # True for a named in-place call on the CPU, which start() can submit without further work.
        self._plain = in_place and self._device is None and call.name is not None

    def start(self, array: Any, waits: bool = False) -> Any:
        """Submits the call on `array`. Returns None if the array has a different form. Otherwise
        returns the handle, or the result if `waits` is true and the call is already done."""
        if type(array) is not self._type:
            return None
        pointer, memory = self._lent(array, self._dtype, self._shape, self._in_place, self._device)
        if not pointer:
            return None
        site = here(4 if waits else 3)  # skips here(), start() and one or two decorators
        call = self._prepared.get(site.text) or self._prepare(site)
        submit = call.call if waits else call.start
        if not self._plain:
            return self._start(call, submit, array, pointer, memory)
        number = lend(submit, pointer, pointer, memory)
        return OneHandle(number, array, self._call, self._timeout) if number else array

    def _start(
        self,
        call: PreparedCall,
        submit: Callable[[Any, Any], int],
        array: Any,
        pointer: Any,
        memory: object,
    ) -> Any:
        kind, device = self._kind, self._device
        result, output = array, pointer
        if not self._in_place:
            try:
                result = kind.empty(array)
            except RuntimeError:  # out of GPU memory; the ordinary call reports this to the peers
                return None
            output, written = kind.lent(result, self._dtype, self._shape, True, device)
            memory = memory, written
        if self._call.name is None:
            begin_unnamed(self._call)
        if device is not None:
            stream = partial(kind.stream, array)
            number = call.submit_on(pointer, output, stream(), memory)
            return GpuHandle([number], lambda _: result, self._call, self._timeout, stream)
        number = lend(submit, pointer, output, memory)
        return OneHandle(number, result, self._call, self._timeout) if number else result

    def _prepare(self, site: Site) -> PreparedCall:
        pointers = self._kind.gives_pointers
        call = PreparedCall(self._call, self._buffer, pointers=pointers, site=site)
        return self._prepared.setdefault(site.text, call)  # another thread may have been first
