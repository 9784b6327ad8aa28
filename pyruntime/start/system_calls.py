# SPDX-License-Identifier: Apache-2.0
"""System calls that the modules `os` and `signal` lack if Python was built for an old Linux.

This is so with conda's and uv's Python. Each function raises OSError if the kernel does not know
the call, or if a sandbox forbids it.
"""

from __future__ import annotations

import ctypes
import os

# System calls that are newer than Linux 5.0 have the same number on every architecture.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
_CLOSE_ON_EXEC = 1
_libc = ctypes.CDLL(None, use_errno=True)


def pidfd_open(pid: int) -> int:
    """Returns a file descriptor of this process. It is readable once the process has ended."""
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0))


def pidfd_send_signal(process: int, number: int) -> None:
    """Sends a signal to a process. `process` is a descriptor from pidfd_open()."""
    _checked(_libc.syscall(_PIDFD_SEND_SIGNAL, process, number, None, 0))


def memfd_create(name: str) -> int:
    """Returns a file descriptor of an empty file in memory. A new program does not inherit it."""
    return _checked(_libc.memfd_create(name.encode(), _CLOSE_ON_EXEC))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
