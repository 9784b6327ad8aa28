# SPDX-License-Identifier: Apache-2.0
"""The end of this rank's part in the job, by an exception that leaves a call: Ctrl-C, a signal
handler's, or one that breaks off a backward pass. For all calls and adapters, on any thread.

Nobody can tell how far such a call has got, so this rank cannot meet the others again: they get a
PeerError with the cause, and its own next call raises ShutdownError. Memory stays lent as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from farandole import _library, topology
from farandole._library import lib
from farandole.errors import ShutdownError
from farandole.start.leaving import describe

_MOMENT = 0.5  # seconds, in which a program ends that does not catch an exception


def end(reason: BaseException) -> None:
    """Ends it, if that has not happened yet; does not wait. The caller raises `reason`."""
    if lib.farandole_initialized() and not _library.why_left:
        cause = describe(reason)
        topology.keep()
        _library.why_left = (
            f"this rank has left the job, because an exception has left a call: {cause}; remedy: "
            "end the program, or shutdown() and init() on all ranks"
        )
        lib.farandole_shutdown(1, cause.encode(errors="replace"), 0.0)


def end_soon(reason: Exception, still: Callable[[], bool]) -> None:
    """The same in a moment, if `still()` is true by then. If the exception that is under way ends
    the program, the peers are told that one."""

    def act() -> None:
        if still():
            end(reason)

    timer = threading.Timer(_MOMENT, act)
    timer.daemon = True
    with suppress(RuntimeError):  # the interpreter ends
        timer.start()


def check() -> None:
    """Raises ShutdownError if it has ended."""
    if _library.why_left:
        raise ShutdownError(_library.why_left)


def has_ended() -> bool:
    """True from end() until shutdown()."""
    return bool(_library.why_left)


def restart() -> None:
    """Forgets the end: the rank has left the job as a whole."""
    _library.why_left = ""
    topology.forget()
