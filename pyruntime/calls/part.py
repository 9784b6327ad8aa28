# SPDX-License-Identifier: Apache-2.0
"""Makes this rank leave the job when an exception interrupts a call. Such exceptions are Ctrl-C, an
error in a signal handler, and an error in a backward pass. All calls and adapters use this module,
on any thread.

Nobody knows how far an interrupted call has got, so this rank cannot take part in calls again. The
other ranks get a PeerError with the cause, and the next call on this rank raises ShutdownError. The
interrupted call's memory stays lent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from farandole import _library, topology
from farandole._library import lib
from farandole.errors import ShutdownError
from farandole.start.leaving import describe

_MOMENT = 0.5  # seconds; long enough for an uncaught exception to end the program


def end(reason: BaseException) -> None:
    """Makes this rank leave if it has not left yet. Does not wait. The caller then raises
    `reason`."""
    if lib.farandole_initialized() and not _library.why_left:
        cause = describe(reason)
        topology.keep()
        _library.why_left = (
            f"this rank has left the job, because an exception interrupted a call: {cause}; "
            "remedy: end the program, or call shutdown() and init() on all ranks"
        )
        lib.farandole_shutdown(1, cause.encode(errors="replace"), 0.0)


def end_soon(reason: Exception, still: Callable[[], bool]) -> None:
    """Calls end(reason) half a second later if `still()` is true at that time. If the exception
    ends the program before then, peers get the exception itself as the cause."""

    def act() -> None:
        if still():
            end(reason)

    timer = threading.Timer(_MOMENT, act)
    timer.daemon = True
    with suppress(RuntimeError):  # the interpreter is shutting down
        timer.start()


def check() -> None:
    """Raises ShutdownError if end() has been called and shutdown() has not been called since."""
    if _library.why_left:
        raise ShutdownError(_library.why_left)


def has_ended() -> bool:
    """Returns True if end() has been called and shutdown() has not been called since."""
    return bool(_library.why_left)


def restart() -> None:
    """Undoes end(). shutdown() calls this."""
    _library.why_left = ""
    topology.forget()
