# SPDX-License-Identifier: Apache-2.0
"""Calls on one array that come again, as in every step of a training loop: prepared once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from farandole.buffers import EMPTY, Buffer, kind_of
from farandole.handles import OneHandle, sweep
from farandole.requests import Call, PreparedTensor, begin_unnamed

__all__ = ["Repeat", "clear", "find", "key_of", "remember"]

_MOST = 4096  # calls that are known; the oldest go first
_repeats: dict[Hashable, Repeat] = {}


def key_of(function: object, array: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What two calls have in common if one is the other come again.

    Unnamed ones are many: the array's form tells them apart.
    """
    if kwargs.get("name") is not None:
        return (function, args, *kwargs.items())
    form = (getattr(array, "dtype", None), getattr(array, "shape", None))
    return (function, args, *kwargs.items(), form)


def find(key: Hashable) -> Repeat | None:
    """What was remembered under a key."""
    try:
        return _repeats.get(key)
    except TypeError:  # not hashable
        return None


def remember(key: Hashable, repeat: Repeat) -> None:
    """Keeps a call that has been made once."""
    try:
        _repeats[key] = repeat
    except TypeError:
        return
    if len(_repeats) > _MOST:
        _repeats.pop(next(iter(_repeats)), None)


def clear() -> None:
    """Forgets all: names and numbers of process sets may stand for something else from now on."""
    _repeats.clear()


class Repeat:
    """A call whose result has its input's form, for arrays such as it was first made with."""

    __slots__ = ("_buffer", "_call", "_dtype", "_in_place", "_kind", "_tensor", "_timeout", "_type")

    def __init__(
        self, call: Call, array: Any, buffer: Buffer, in_place: bool, timeout: float | None
    ) -> None:
        """`buffer` describes `array`; neither is kept alive."""
        self._call = call
        self._type = type(array)
        self._kind = kind_of(array)
        self._dtype = getattr(array, "dtype", None)
        self._buffer = replace(buffer, pointer=EMPTY, owner=None)  # whose address does not count
        self._in_place = in_place
        self._timeout = timeout
        self._tensor: PreparedTensor | None = None

    def start(self, array: Any) -> OneHandle[Any] | None:
        """Submits it for `array`, or gives None where that is not such an array."""
        if type(array) is not self._type:
            return None
        kind, in_place, shape = self._kind, self._in_place, self._buffer.shape
        pointer = output = kind.address(array, self._dtype, shape, in_place)
        if not pointer:
            return None
        result = array
        if not in_place:
            result = kind.empty(array)
            output = kind.address(result, self._dtype, shape, True)
        if self._tensor is None:
            self._tensor = PreparedTensor(self._call, self._buffer)
        sweep()
        if self._call.name is None:
            begin_unnamed(self._call)
        number = self._tensor.submit(pointer, output)
        return OneHandle(number, (array, result), result, self._call, self._timeout)
