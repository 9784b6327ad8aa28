# SPDX-License-Identifier: Apache-2.0
"""Python stacks for the core's StackReporter, also while the main thread is in native code.

faulthandler writes the stacks to a pipe when a real-time signal reaches the main thread; the core
sends that signal to its own process when the coordinator asks, and reads the pipe.
"""

from __future__ import annotations

import faulthandler
import os

from farandole._library import check_count, lib
from farandole.config import setting
from farandole.installed import own_folders

_installed = False


def _left_out() -> list[str]:
    """The package's folders, whose frames hide the user's; none if debugging the package."""
    return [] if setting("FARANDOLE_LOG_LEVEL") in ("debug", "trace") else own_folders()


def install() -> None:
    """Makes the stacks available, once per process. init() calls this.

    It replaces no handler of the user: the signal is one without a handler, or the one that
    FARANDOLE_STACK_SIGNAL names. Raises ValueError if that can't be handled.
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
    except (OSError, RuntimeError, ValueError) as reason:  # SIGKILL, SIGSEGV, glibc's own, ...
        lib.farandole_stacks(0, -1, b"")
        os.close(reader)
        os.close(writer)
        raise ValueError(
            f"FARANDOLE_STACK_SIGNAL={number}: Python can't show its stacks by this signal "
            f"({reason}); unset the variable, and farandole chooses a free signal"
        ) from reason
    _installed = True
