# SPDX-License-Identifier: Apache-2.0
"""Handles for calls on GPUs. wait() returns once the work is launched, and from then on the
caller's stream waits for the result. The framework-neutral calls and the torch adapter use this
module. It may be used from any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farandole._library import check, lib
from farandole.calls import leases
from farandole.calls.handles import Handle
from farandole.calls.leases import numbers_of

T = TypeVar("T")


def join_stream(handles: Sequence[int], stream: int) -> None:
    """Makes later work in a CUDA stream wait for results of handles whose wait() has returned.

    Does not block. Raises LibraryError if the device has failed.
    """
    numbers = numbers_of(handles)
    check(lib.farandole_join_stream(numbers, len(numbers), stream))


class GpuHandle(Handle[T]):
    """A Handle whose wait() only waits for the launch, then makes the caller's stream wait.

    The buffers are kept until the GPU is done with them, which may be after wait() returns.
    """

    __slots__ = ("_joined", "_launched", "_stream")

    def __init__(
        self,
        numbers: Any,
        collect: Callable[[Any], T],
        what: object,
        timeout: float | None,
        stream: Callable[[], int],
    ) -> None:
        """`stream` returns the caller's current stream. The other arguments are those of Handle."""
        super().__init__(numbers, collect, what, timeout)
        self._stream = stream
        self._launched: Any = None
        self._joined = 0

    def wait(self, timeout: float | None = None) -> T:
        """Returns the result after the launch. The caller's current stream waits for its values."""
        value = super().wait(timeout)
        stream = self._stream()
        if stream != self._joined and not self._lost():
            moving = [n for n in self._launched if lib.farandole_settled(n) == 0]
            if moving:
                join_stream(moving, stream)
        return value

    def _complete(self, numbers: Any, failure: Exception | None) -> None:
        if failure is None:
            self._joined = self._stream()
            join_stream(numbers, self._joined)
            self._launched = numbers
        super()._complete(numbers, failure)

    def _let_go(self, numbers: Any, failure: Exception | None) -> None:
        leases.drop(numbers)
