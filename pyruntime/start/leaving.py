# SPDX-License-Identifier: Apache-2.0
"""Hooks that tell a process's peers why the process ends.

The first init() installs the hooks. They run on the thread that ends the process, and they call the
hooks that were installed before. They do nothing while the runtime is down. In notebooks and
interactive sessions they ignore exceptions, because exceptions do not end the process there.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

# Called as leave(text, failed). `failed` is True if the cause is an exception or an exit code.
Leave = Callable[[str, bool], None]


class _Cause:
    """The cause of this process's end, as far as the hooks know it."""

    def __init__(self) -> None:
        self.exception = ""
        self.kind: type[BaseException] | None = None
        self.threads: list[str] = []
        self._exit = ""
        self._at: tuple[FrameType, int] | None = None

    def exiting(self, text: str) -> None:
        """Notes a call of sys.exit(). This call is the cause, unless its exception is caught."""
        root = sys._getframe()
        while root.f_back is not None:
            root = root.f_back
        self._exit, self._at = text, (root, root.f_lasti)

    def exit_code(self) -> str:
        """Returns a text about the sys.exit() that ends this process, or "" if it was caught."""
        called = self._at is not None and self._at[0].f_lasti == self._at[1]
        return self._exit if called else ""

    def failed(self) -> bool:
        return bool(self.exception or self.exit_code())

    def text(self) -> str:
        return "; ".join(filter(None, [self.exception or self.exit_code(), *self.threads]))


_cause = _Cause()
_leave: Leave | None = None
_waits: list[Callable[[], object]] = []


def wait_first(wait: Callable[[], object]) -> None:
    """Registers a function that waits for a framework's threads, which still call the core.

    The function is called before a process leaves without an error.
    """
    _waits.append(wait)


def install(leave: Leave) -> None:
    """Installs the hooks, once per process. They call `leave` with the cause."""
    global _leave
    if _leave is not None:
        return
    _leave = leave
    atexit.register(leave_now)
    _chain_excepthook()
    _chain_thread_excepthook()
    _chain_exit()
    _end_with_multiprocessing()


def leave_now() -> None:
    """Calls `leave` with the cause that is known so far. Called by atexit and at the end of MPI."""
    if _leave is not None:
        for wait in _waits if not _cause.failed() else ():
            with contextlib.suppress(Exception):  # the framework reports errors
                wait()
        _leave(_cause.text(), _cause.failed())


def failed() -> bool:
    """Returns True if, as far as is known, an exception or exit code is ending this process."""
    return _cause.failed()


def kind() -> type[BaseException] | None:
    """Returns the class of the exception that is ending this process, or None."""
    return _cause.kind


def describe(error: BaseException | None, kind: type[BaseException] | None = None) -> str:
    """Formats an exception as one line: its type and the first line of its text."""
    name = (kind or type(error)).__name__
    lines = str(error).strip().splitlines() if error is not None else []
    return f"{name}: {lines[0]}" if lines else name


def _interactive() -> bool:
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _chain_excepthook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _interactive():
            return
        _cause.exception, _cause.kind = describe(error, kind), kind
        # If the interpreter calls this, the process is ending. It must leave before it joins
        # threads that may wait for peers. If other code calls this, the process may continue.
        if sys._getframe().f_back is None:
            leave_now()

    sys.excepthook = hook


def _chain_thread_excepthook() -> None:
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        before(args)
        name = args.thread.name if args.thread is not None else "a thread"
        _cause.threads.append(f"in {name} {describe(args.exc_value, args.exc_type)}")

    threading.excepthook = hook


def _chain_exit() -> None:
    before = sys.exit

    def exit_(status: object = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # else only a thread ends
            _cause.exiting("" if status in (None, 0) else f"sys.exit({status!r})")
        before(status)  # type: ignore[arg-type]

    sys.exit = exit_


def _end_with_multiprocessing() -> None:
    """Handles children of multiprocessing, which bypass sys.excepthook.

    Forked children bypass atexit as well.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return
    from multiprocessing.util import Finalize

    def end() -> None:
        error = sys.exc_info()[1]  # raised by the child's function
        if error is not None and not isinstance(error, SystemExit):
            _cause.exception, _cause.kind = describe(error), type(error)
        leave_now()

    Finalize(None, end, exitpriority=0)
