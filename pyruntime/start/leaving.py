# SPDX-License-Identifier: Apache-2.0
"""How a process leaves the job: whatever ends it, its peers learn the cause.

Hooks are installed by the first init() and chain to those they find; they do nothing while the
runtime is down. Notebooks and interactive sessions survive exceptions, so these are no cause there.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import NoReturn

__all__ = ["install"]

# Called as leave(text, failed): failed where an exception or an exit code is the cause.
Leave = Callable[[str, bool], None]


class _Cause:
    """Why this process is about to end, as far as the hooks have seen."""

    def __init__(self) -> None:
        self.exception = ""
        self.threads: list[str] = []
        self._exit = ""
        self._raised = ""
        self._at: tuple[FrameType, int] | None = None

    def exiting(self, text: str) -> None:
        """sys.exit was called; it counts only if it is not caught on its way up."""
        root = sys._getframe()
        while root.f_back is not None:
            root = root.f_back
        self._exit, self._at = text, (root, root.f_lasti)

    def exit_code(self) -> str:
        """The sys.exit that ends this process; a caught one let the outermost frame go on."""
        called = self._at is not None and self._at[0].f_lasti == self._at[1]
        return self._exit if called else self._raised

    def unwinding(self, _code: CodeType, _offset: int, error: BaseException) -> None:
        """A frame ends by an exception. That of the outermost one, if it is SystemExit, reaches no
        excepthook."""
        if not isinstance(error, SystemExit) or sys._getframe(1).f_back is not None:
            return
        if threading.current_thread() is threading.main_thread():
            self._raised = "" if error.code in (None, 0) else f"SystemExit({error.code!r})"

    def failed(self) -> bool:
        return bool(self.exception or self.exit_code())

    def text(self) -> str:
        return "; ".join(filter(None, [self.exception or self.exit_code(), *self.threads]))


_cause = _Cause()
_leave: Leave | None = None


def install(leave: Leave) -> None:
    """Has `leave` called when this process ends, with the cause. Once per process."""
    global _leave
    if _leave is not None:
        return
    _leave = leave
    atexit.register(leave_now)
    _chain_excepthook()
    _chain_thread_excepthook()
    _chain_exit()
    _watch_unwinding()


def leave_now() -> None:
    """Leaves with the cause known so far; at exit, and when the user finalises MPI."""
    if _leave is not None:
        _leave(_cause.text(), _cause.failed())


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
        _cause.exception = describe(error, kind)
        # Called by the interpreter itself the process is ending: leave before it joins threads
        # that may wait for peers. Called by other code it may go on.
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
        if threading.current_thread() is threading.main_thread():  # else it ends a thread only
            _cause.exiting("" if status in (None, 0) else f"sys.exit({status!r})")
        before(status)  # type: ignore[arg-type]

    sys.exit = exit_


def _watch_unwinding() -> None:
    """Sees `raise SystemExit(3)`, which passes sys.exit by; from Python 3.12 on, as a free tool."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    tool = next((t for t in (4, 3) if monitoring.get_tool(t) is None), None)  # no usual tool's
    if tool is None:
        return
    monitoring.use_tool_id(tool, "farandole")
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, _cause.unwinding)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)
