# SPDX-License-Identifier: Apache-2.0
"""How a rank that others wait for shows where its Python is, even while it is stuck in native code.

faulthandler writes the stacks to a pipe when a real-time signal reaches the main thread; the core
sends that signal to its own process when the coordinator asks, and reads the pipe.
"""

from __future__ import annotations

import faulthandler
import os

from farandole._library import check_count, lib

__all__ = ["install"]

_installed = False


def install() -> None:
    """Makes the stacks available, once per process. init() calls this.

    No handler of the user's is replaced: the signal is one that nobody handles, or the one that
    FARANDOLE_STACK_SIGNAL names.
    """
    global _installed
    if _installed:
        return
    _installed = True
    number = check_count(lib.farandole_stack_signal())
    if number == 0:
        return
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    lib.farandole_stacks(number, reader)
    faulthandler.register(number, file=writer, all_threads=True)
