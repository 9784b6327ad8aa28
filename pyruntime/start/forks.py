# SPDX-License-Identifier: Apache-2.0
"""Closes the package's sockets in forked children. A peer must see its connection end when this
process ends, though children of it live on; nor may they keep its ports. The core does the same
with its own."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class _HasNumber(Protocol):
    def fileno(self) -> int: ...


S = TypeVar("S", bound=_HasNumber)
_ours: weakref.WeakSet[_HasNumber] = weakref.WeakSet()


def not_inherited(descriptor: S) -> S:
    """Has forked children close this socket or selector; returns it."""
    _ours.add(descriptor)
    return descriptor


def _after_fork() -> None:
    """The numbers stay in use, because objects still know them."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in list(_ours):
        with contextlib.suppress(ValueError, OSError):  # it is closed
            os.dup2(nothing, descriptor.fileno(), inheritable=False)
    os.close(nothing)
    _ours.clear()


os.register_at_fork(after_in_child=_after_fork)
