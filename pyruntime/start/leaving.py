# SPDX-License-Identifier: Apache-2.0
"""Hooks at the end of a process: whatever ends it, its peers are told the cause. For init(); they
run on the thread that ends.

The first init() installs the hooks, which also call those installed before. They do nothing while
the runtime is down. In notebooks and interactive sessions exceptions are not a cause.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

# Called as leave(text, failed): failed where an exception or an exit code is the cause.
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
        """Notes a call of sys.exit; it is the cause only if it is not caught."""
        root = sys._getframe()
        while root.f_back is not None:
            root = root.f_back
        self._exit, self._at = text, (root, root.f_lasti)

    def exit_code(self) -> str:
        """The text of the sys.exit that ends this process; a caught one is left out."""
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
    """Registers what a process that ends well waits for before it leaves: work of a framework that
    calls the core on its own threads."""
    _waits.append(wait)


def install(leave: Leave) -> None:
    """Registers `leave`, to be called with the cause when this process ends. Once per process."""
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
    """Leaves with the cause known so far; at exit, and when the user finalises MPI."""
    if _leave is not None:
        for wait in _waits if not _cause.failed() else ():
            with contextlib.suppress(Exception):  # the framework itself tells it
                wait()
        _leave(_cause.text(), _cause.failed())


def failed() -> bool:
    """Whether an exception or an exit code ends this process, as far as is known."""
    return _cause.failed()


def kind() -> type[BaseException] | None:
    """The class of the exception that ends this process; None: there is none."""
    return _cause.kind


def describe(error: BaseException | None, kind: type[BaseException] | None = None) -> str:
    """One line: the exception's type and text."""
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
        # If the interpreter calls this, the process is ending: leave before it joins threads
        # that may wait for peers. If other code calls it, the process may continue.
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
        if threading.current_thread() is threading.main_thread():  # else it ends only a thread
            _cause.exiting("" if status in (None, 0) else f"sys.exit({status!r})")
        before(status)  # type: ignore[arg-type]

    sys.exit = exit_


def _end_with_multiprocessing() -> None:
    """A child of multiprocessing tells nobody of its exceptions, and a forked one ends without
    atexit."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return
    from multiprocessing.util import Finalize

    def end() -> None:
        error = sys.exc_info()[1]  # what the child's function has raised
        if error is not None and not isinstance(error, SystemExit):
            _cause.exception, _cause.kind = describe(error), type(error)
        leave_now()

    Finalize(None, end, exitpriority=0)
