# SPDX-License-Identifier: Apache-2.0
"""Provides Python stacks to the core's StackReporter, even while the main thread runs native code.

When the coordinator asks, the core sends this process a real-time signal. faulthandler then writes
the stacks to a pipe, which the core reads.
"""

from __future__ import annotations

import faulthandler
import os

from farandole._library import check_count, lib
from farandole.config import setting
from farandole.installed import own_folders

_installed = False


def _left_out() -> list[str]:
    """Returns the folders whose frames are omitted from stacks. These are farandole's own folders,
    unless somebody is debugging farandole."""
    return [] if setting("FARANDOLE_LOG_LEVEL") in ("debug", "trace") else own_folders()


def install() -> None:
    """Makes stacks available, once per process. init() calls this.

    Uses the signal that FARANDOLE_STACK_SIGNAL names or, by default, a signal that has no handler
    yet. Never replaces an existing handler. Raises ValueError if Python can't handle the signal.
    """
    global _installed
    if _installed:
        return
    number = check_count(lib.farandole_stack_signal())
    if number == 0:
        _installed = True
        return
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    lib.farandole_stacks(number, reader, ":".join(_left_out()).encode())
    try:
        faulthandler.register(number, file=writer, all_threads=True)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as reason:  # SIGKILL, SIGSEGV, reserved by glibc, ...
        lib.farandole_stacks(0, -1, b"")
        os.close(reader)
        os.close(writer)
        raise ValueError(
            f"FARANDOLE_STACK_SIGNAL={number}: Python can't show its stacks by this signal "
            f"({reason}); unset the variable: farandole then chooses a free signal"
        ) from reason
    _installed = True
