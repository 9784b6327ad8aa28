# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at random moments of a wait: by a timer, or once a call has been submitted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import farandole as fd

__all__ = ["TIMEOUT", "install", "interrupted_once_submitted", "interrupted_soon"]

TIMEOUT = 0.004  # seconds


def install() -> None:
    """SIGALRM is Ctrl-C from here on."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)


@contextmanager
def interrupted_soon() -> Iterator[None]:
    """KeyboardInterrupt in this block if it takes longer than TIMEOUT."""
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _let_in()


@contextmanager
def interrupted_once_submitted() -> Iterator[None]:
    """KeyboardInterrupt in this block a moment after it has submitted a call, if it still runs."""
    ended = threading.Event()
    before = fd.metrics()["tensors_submitted"]
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        while fd.metrics()["tensors_submitted"] == before:
            if ended.is_set():
                return
        if not ended.wait(TIMEOUT):
            signal.pthread_kill(main, signal.SIGALRM)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        _end(ended, watcher)


def _end(ended: threading.Event, watcher: threading.Thread) -> None:
    """So that an interrupt comes before this returns or never."""
    try:
        ended.set()
        watcher.join()
        _let_in()
    except KeyboardInterrupt:
        watcher.join()
        raise


def _let_in() -> None:
    """Python runs handlers of signals that have arrived before this returns."""
    for _ in range(100):
        pass
