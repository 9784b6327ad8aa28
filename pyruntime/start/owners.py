# SPDX-License-Identifier: Apache-2.0
"""Starts threads that own resources, such as sockets. May be used from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


def start_owner(
    name: str, run: Callable[[], object], release: Callable[[], object]
) -> threading.Thread:
    """Starts a daemon thread that calls `run`, which releases the thread's resources in the end.

    If this raises an error, because the system has no thread left or because a signal handler
    raises, either the thread calls `run`, or this function has called `release`. The caller must
    then make `run` end, for example by closing the other end of a socket.
    """
    waiting = [run]  # whoever takes the function out owns the resources

    def begin() -> None:
        try:
            body = waiting.pop()
        except IndexError:  # release() has been called
            return
        body()

    thread = threading.Thread(target=begin, name=name, daemon=True)
    try:
        thread.start()
    except BaseException:
        with contextlib.suppress(IndexError):  # the thread has taken the function
            waiting.pop()
            release()
        raise
    return thread
