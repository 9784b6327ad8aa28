# SPDX-License-Identifier: Apache-2.0
"""Calls on one array that come again, as in every step of a training loop: prepared once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from farandole.arrays.buffers import EMPTY, Buffer
from farandole.arrays.kinds import kind_of
from farandole.calls.gpu_handle import GpuHandle
from farandole.calls.handles import Handle, OneHandle
from farandole.calls.leases import lend
from farandole.calls.requests import Call, PreparedOnGpu, PreparedTensor, begin_unnamed

__all__ = ["Repeat", "again", "clear", "remember"]

_MOST = 4096  # calls that are known; the oldest go first
_repeats: dict[Hashable, Repeat] = {}
_preparing = threading.Lock()


def _key_of(function: object, array: Any, args: Any, kwargs: dict[str, Any]) -> Hashable:
    """Under what a call is kept: its name. Unnamed ones are many: the array's form tells them
    apart."""
    name = kwargs.get("name")
    if name is not None:
        return function, name
    form = getattr(array, "dtype", None), getattr(array, "shape", None)
    return function, args, *kwargs.values(), form


def again(function: object, array: Any, args: Any, kwargs: dict[str, Any]) -> Handle[Any] | None:
    """Submits the call if it is one that was remembered come again; else gives None."""
    try:
        repeat = _repeats.get(_key_of(function, array, args, kwargs))
        if repeat is None or repeat.kwargs != kwargs or repeat.args != args:
            return None
    except (TypeError, ValueError):  # an argument that has no hash, or cannot be compared
        return None
    return repeat.start(array)


def remember(
    function: object, array: Any, args: Any, kwargs: dict[str, Any], repeat: Repeat
) -> None:
    """Keeps a call that has been made once."""
    repeat.args, repeat.kwargs = args, kwargs
    try:
        _repeats[_key_of(function, array, args, kwargs)] = repeat
    except TypeError:
        return
    if len(_repeats) > _MOST:
        _repeats.pop(next(iter(_repeats)), None)


def clear() -> None:
    """Forgets all: names and numbers of process sets may stand for something else from now on."""
    _repeats.clear()


class Repeat:
    """A call whose result has its input's form, for arrays such as it was first made with."""

    __slots__ = (
        "_buffer",
        "_call",
        "_device",
        "_dtype",
        "_in_place",
        "_kind",
        "_lent",
        "_shape",
        "_submit",
        "_tensor",
        "_timeout",
        "_type",
        "args",
        "kwargs",
    )

    def __init__(
        self, call: Call, array: Any, buffer: Buffer, in_place: bool, timeout: float | None
    ) -> None:
        """`buffer` describes `array`; neither is kept alive."""
        self._call = call
        self._type = type(array)
        self._kind = kind_of(array)
        self._dtype = getattr(array, "dtype", None)
        self._shape = buffer.shape
        # None: the CPU
        self._device = getattr(array, "device", None) if buffer.device >= 0 else None
        self._buffer = replace(buffer, pointer=EMPTY, owner=None)  # whose address does not count
        self._in_place = in_place
        self._timeout = timeout
        self._tensor: PreparedTensor | None = None
        self._lent = self._kind.lent
        # Of named calls in place on the CPU, once prepared: all that is left to do.
        self._submit: Callable[[Any, Any], int] | None = None
        self.args: Any = ()
        self.kwargs: dict[str, Any] = {}

    def start(self, array: Any) -> Handle[Any] | None:
        """Submits it for `array`, or gives None where that is not such an array."""
        if type(array) is not self._type:
            return None
        pointer, memory = self._lent(array, self._dtype, self._shape, self._in_place, self._device)
        if not pointer:
            return None
        if self._submit is None:
            return self._start(array, pointer, memory)
        number = lend(self._submit, pointer, pointer, memory)
        return OneHandle(number, array, self._call, self._timeout)

    def _start(self, array: Any, pointer: Any, memory: object) -> Handle[Any] | None:
        kind, device = self._kind, self._device
        result, output = array, pointer
        if not self._in_place:
            try:
                result = kind.empty(array)
            except RuntimeError:  # memory of a GPU is short: peers must hear of that
                return None
            output, written = kind.lent(result, self._dtype, self._shape, True, device)
            memory = memory, written
        tensor = self._tensor
        if tensor is None:
            tensor = self._prepare()
        if self._call.name is None:
            begin_unnamed(self._call)
        if device is not None:
            stream = partial(kind.stream, array)
            number = PreparedOnGpu(tensor, stream).submit(pointer, output, memory)
            return GpuHandle([number], lambda _: result, self._call, self._timeout, stream)
        number = lend(tensor.start, pointer, output, memory)
        return OneHandle(number, result, self._call, self._timeout)

    def _prepare(self) -> PreparedTensor:
        with _preparing:  # which another thread may do as well
            if self._tensor is None:
                pointers = self._kind.gives_pointers
                self._tensor = PreparedTensor(self._call, self._buffer, pointers=pointers)
                if self._in_place and self._device is None and self._call.name is not None:
                    self._submit = self._tensor.start
            return self._tensor
