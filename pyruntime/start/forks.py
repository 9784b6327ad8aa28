# SPDX-License-Identifier: Apache-2.0
"""Closes the package's sockets in forked children.

Otherwise, a child that outlives this process would keep this process's connections and ports open.
The core does the same for the core's sockets.
"""

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
    """Registers a socket or selector to be closed in forked children. Returns the same object."""
    _ours.add(descriptor)
    return descriptor


def _after_fork() -> None:
    """Replaces the descriptors by /dev/null, because objects still hold their numbers."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in list(_ours):
        with contextlib.suppress(ValueError, OSError):  # the descriptor is closed already
            os.dup2(nothing, descriptor.fileno(), inheritable=False)
    os.close(nothing)
    _ours.clear()


os.register_at_fork(after_in_child=_after_fork)
