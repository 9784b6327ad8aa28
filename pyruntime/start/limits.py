# SPDX-License-Identifier: Apache-2.0
"""Checks the machine's limits for init(), so that errors name a remedy.

Without these checks, the system's errors would not name a remedy, or MPI would crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from farandole.errors import LibraryError

_FILES = 16  # init() opens at least so many files. With fewer, Open MPI crashes.
_THREADS = "raise the limit of threads (ulimit -u, or pids.max of the cgroup)"


def check_files() -> None:
    """Raises LibraryError if this process's limit on open files is too low.

    Call this before MPI starts. It is not needed without MPI, because the ranks then meet first,
    and all of them get the error.
    """
    opened: list[int] = []
    try:
        with typed():
            opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(_FILES))
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Context manager that raises LibraryError if files or threads run out."""
    try:
        yield
    except Exception as reason:
        error = of_machine(reason)
        if error is reason:
            raise
        raise error from reason


def of_machine(reason: Exception) -> Exception:
    """Returns a LibraryError with a remedy if files or threads have run out, else `reason`."""
    number = reason.errno if isinstance(reason, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return LibraryError(
            f"init(): {reason}: this process may open {limit} files. Remedy: `ulimit -n 4096` "
            "where the ranks start (`farandole doctor` says how many are needed)"
        )
    if number == errno.EAGAIN or str(reason).startswith("can't start new thread"):
        return LibraryError(f"init(): {reason}. Remedy: {_THREADS} or of memory (ulimit -v)")
    return reason
