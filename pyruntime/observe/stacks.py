# SPDX-License-Identifier: Apache-2.0
"""Provides Python stacks to the core's StackReporter.

A thread of Python answers the core's requests. It holds the GIL, so every frame that it reads stays
valid. If native code holds the GIL, the thread cannot run. The core then sends this process a
real-time signal, and faulthandler writes the main thread's stack to a pipe. faulthandler must not
write the other threads' stacks: a signal handler does not hold the GIL, so another thread may free
a frame while the handler reads it, and the process crashes.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
from itertools import dropwhile
from traceback import walk_stack
from types import FrameType

from farandole._library import check_count, lib
from farandole.config import setting
from farandole.installed import own_folders

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
    signal = check_count(lib.farandole_stack_signal())
    core, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    lib.farandole_stacks(core.fileno(), signal, reader)
    left_out = () if setting("FARANDOLE_LOG_LEVEL") in ("debug", "trace") else _own_folders()
    thread = threading.Thread(
        target=_answer, args=(own, left_out), name="farandole.stacks", daemon=True
    )
    try:
        thread.start()
        _register(signal, writer)
    except (RuntimeError, ValueError):
        lib.farandole_stacks(-1, 0, -1)
        core.close()  # which ends the thread
        os.close(reader)
        os.close(writer)
        raise
    core.detach()  # the core keeps both `core` and `reader` open
    _installed = True


def _register(signal: int, writer: int) -> None:
    """Lets the signal write the main thread's stack to a pipe. Does nothing for the signal 0."""
    if signal == 0:
        return
    try:
        faulthandler.register(signal, file=writer, all_threads=False)
    except (OSError, RuntimeError, ValueError) as reason:  # SIGKILL, reserved by glibc, ...
        raise ValueError(
            f"FARANDOLE_STACK_SIGNAL={signal}: Python can't show its stacks by this signal "
            f"({reason}); unset the variable: farandole then chooses a free signal"
        ) from reason


def _own_folders() -> tuple[str, ...]:
    """Returns farandole's folders. Their frames are omitted at the top of stacks, unless somebody
    is debugging farandole."""
    return tuple(f"{folder}/" for folder in own_folders())


def _answer(core: socket.socket, left_out: tuple[str, ...]) -> None:
    """Answers each request of the core with one message, until the process ends. The first
    character is "1" if no thread but the main thread runs Python code that may make calls."""
    while core.recv(1):
        core.send(_stacks(left_out).encode(errors="replace")[:_MAX_BYTES])


def _stacks(left_out: tuple[str, ...]) -> str:
    """Returns the answer: the stacks of all threads but this one, the main thread's first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    main = frames.pop(threading.main_thread().ident or 0, None)
    alone = main is not None and all(map(_is_quiet, frames.values()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [_stack("Main thread", main, left_out)] if main else []
    parts += [
        _stack(f"Thread {names.get(ident, hex(ident))}", frame, left_out)
        for ident, frame in frames.items()
    ]
    return f"{alone:d}" + "\n".join(parts)


def _is_quiet(frame: FrameType) -> bool:
    """Returns True for a thread that never calls farandole."""
    return any(at.f_code.co_filename.endswith(_QUIET_FILES) for at, _ in walk_stack(frame))


def _stack(whose: str, frame: FrameType, left_out: tuple[str, ...]) -> str:
    """Returns a thread's stack as faulthandler writes it. The first frame is the user's."""
    places = [(at.f_code.co_filename, line, at.f_code.co_name) for at, line in walk_stack(frame)]
    places = list(dropwhile(lambda place: place[0].startswith(left_out), places))
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in places]
    if len(lines) > _MAX_FRAMES:
        lines[_MAX_FRAMES:] = ["  ..."]
    return "\n".join([f"{whose} (most recent call first):", *lines, ""])
