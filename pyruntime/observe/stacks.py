# SPDX-License-Identifier: Apache-2.0
"""Provides Python stacks to the core's StackReporter.

A thread of Python answers the core's requests. It holds the GIL, so every frame that it reads stays
valid. If native code holds the GIL, the thread cannot run. The core then sends this process a
real-time signal, and faulthandler writes the main thread's stack to a pipe. faulthandler must not
write the other threads' stacks: a signal handler does not hold the GIL, so another thread may free
a frame while the handler reads it, and the process crashes.
"""

from __future__ import annotations

import _socket
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from itertools import dropwhile
from traceback import walk_stack
from types import FrameType

from farandole._library import check_count, lib
from farandole.config import setting
from farandole.installed import own_folders
from farandole.start.owners import start_owner

_MAX_BYTES = 65536  # of an answer
_MAX_FRAMES = 100  # of each stack, as faulthandler's limit
# Source files that show that a thread never calls farandole. Such threads are DataLoader feeders
# and pinners, progress bars, TensorBoard's writer, and the listener of the elastic agent.
_QUIET_FILES = (
    "/multiprocessing/queues.py",
    "/torch/utils/data/_utils/pin_memory.py",
    "/tqdm/_monitor.py",
    "/tensorboard/summary/writer/event_file_writer.py",
    "/start/agent_client.py",
)

_installed = False


def install() -> None:
    """Makes stacks available, once per process. init() calls this.

    Uses the signal that FARANDOLE_STACK_SIGNAL names or, by default, a signal that has no handler
    yet. Never replaces an existing handler. Raises ValueError if Python can't handle the signal,
    and RuntimeError if no thread can be started.
    """
    global _installed
    if _installed:
        return
    number = check_count(lib.farandole_stack_signal())
    left_out = () if setting("FARANDOLE_LOG_LEVEL") in ("debug", "trace") else _own_folders()
    with contextlib.ExitStack() as undo:
        core, own = _socket_pair()
        undo.callback(os.close, core)  # ends the thread, which closes `own`
        start_owner("farandole.stacks", lambda: _answer(own, left_out), lambda: os.close(own))
        for end in (pipe := os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)):
            undo.callback(os.close, end)
        reader, writer = pipe
        undo.callback(lib.farandole_stacks, -1, 0, -1)
        lib.farandole_stacks(core, number, reader)
        _register(number, writer, undo)
        undo.pop_all()
    _installed = True


def _socket_pair() -> list[int]:
    """Returns two blocking sockets for messages. Does not use the module `socket`, whose class and
    default timeout a program may have changed."""
    ends = [end.detach() for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)]
    for end in ends:
        os.set_blocking(end, True)
    return ends


def _register(number: int, writer: int, undo: contextlib.ExitStack) -> None:
    """Lets a signal write the main thread's stack to a pipe, until `undo` ends. Does nothing for
    the signal 0."""
    if number == 0:
        return
    try:
        faulthandler.register(number, file=writer, all_threads=False)
        undo.callback(faulthandler.unregister, number)
    except (OSError, RuntimeError, ValueError) as reason:  # SIGKILL, reserved by glibc, ...
        raise ValueError(
            f"FARANDOLE_STACK_SIGNAL={number}: Python can't show its stacks by this signal "
            f"({reason}); unset the variable: farandole then chooses a free signal"
        ) from reason


def _own_folders() -> tuple[str, ...]:
    """Returns farandole's folders. Their frames are omitted at the top of stacks, unless somebody
    is debugging farandole."""
    return tuple(f"{folder}/" for folder in own_folders())


def _answer(core: int, left_out: tuple[str, ...]) -> None:
    """Answers each request of the core with one message, until the core closes its socket. The
    first character is "1" if no thread but the main thread runs Python code that may make calls."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for other threads
    while os.read(core, 1):
        try:
            answer = _stacks(left_out)
        except Exception as reason:  # for example from a thread whose class has its own `name`
            answer = f"0Python can't show its stacks: {reason!r}\n"
        with contextlib.suppress(OSError):  # too long for this system: the core asks the signal
            os.write(core, answer.encode(errors="replace")[:_MAX_BYTES])
    os.close(core)


def _stacks(left_out: tuple[str, ...]) -> str:
    """Returns the answer: the stacks of all threads but this one, the main thread's first."""
    frames = _frames()
    frames.pop(threading.get_ident(), None)
    main = frames.pop(threading.main_thread().ident or 0, None)
    alone = main is not None and all(map(_is_quiet, frames.values()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [_stack("Main thread", main, left_out)] if main else []
    parts += [
        _stack(f"Thread {names.get(ident, hex(ident))}", frame, left_out)
        for ident, frame in frames.items()
    ]
    return f"{alone:d}" + "\n".join(parts)


def _frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread. Prevents garbage collections meanwhile, because
    Python 3.11 before 3.11.12 may then wait for ever (python/cpython#106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _is_quiet(frame: FrameType) -> bool:
    """Returns True for a thread that never calls farandole."""
    return any(at.f_code.co_filename.endswith(_QUIET_FILES) for at, _ in walk_stack(frame))


def _stack(whose: str, frame: FrameType, left_out: tuple[str, ...]) -> str:
    """Returns a thread's stack as faulthandler writes it, without farandole's frames at the top."""
    places = [(at.f_code.co_filename, line, at.f_code.co_name) for at, line in walk_stack(frame)]
    places = list(dropwhile(lambda place: place[0].startswith(left_out), places))
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in places]
    if len(lines) > _MAX_FRAMES:
        lines[_MAX_FRAMES:] = ["  ..."]
    return "\n".join([f"{whose} (most recent call first):", *lines, ""])
