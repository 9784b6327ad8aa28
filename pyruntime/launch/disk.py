# SPDX-License-Identifier: Apache-2.0
"""A disk that may be slow, or full for a moment: a thread uses it, and repeats what has failed. For
the supervisor, whose loop must not wait: agents end the ranks of one that is silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from farandole.commits import LASTING
from farandole.errors import error_text
from farandole.membership.journal import Unready

T = TypeVar("T")
_PAUSES = (0.05, 2.0)  # shortest and longest, in seconds, before what has failed is repeated
_SLOW = 10.0  # seconds after which a disk that does not answer is reported


class _Work:
    """One question to the disk."""

    def __init__(self, key: object, act: Callable[[], object], quiet: bool) -> None:
        self.key, self.act, self.quiet = key, act, quiet
        self.since = time.monotonic()
        self.over = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None  # an OSError may pass: the question is asked again


class Disk:
    """The folder of one job."""

    def __init__(
        self, folder: Path, tell: Callable[[str], object], wake: Callable[[], object]
    ) -> None:
        """`tell` reports that the disk fails, once, and that it works again. `wake` is called on
        the disk's thread when ask() has an answer."""
        self._folder, self._tell, self._wake = folder, tell, wake
        self._asked: dict[str, _Work] = {}  # by kind
        self._failing: dict[str, str] = {}  # by kind: the error
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        threading.Thread(target=self._serve, name="disk", daemon=True).start()

    def ask(self, kind: str, key: object, act: Callable[[], T], quiet: bool = False) -> T:
        """What `act` returns on the disk's thread. Raises Unready until it has returned: ask again
        with an equal key. Raises its error unless that is an OSError, after which it is repeated.
        `quiet`: without a wake().
        """
        work = self._asked.get(kind)
        if work is not None and work.over.is_set():
            del self._asked[kind]
            failed = isinstance(work.error, OSError)
            self._note(kind, error_text(work.error) if isinstance(work.error, OSError) else "")
            if work.key == key and not failed:
                if work.error is not None:
                    raise work.error
                return work.answer  # type: ignore[no-any-return]
            work = None
        if work is None:
            self._asked[kind] = work = _Work(key, act, quiet)
            self._queue.put(work)
        elif time.monotonic() > work.since + _SLOW:
            self._note(kind, f"{self._folder} has not answered for {_SLOW:g} s")
        raise Unready(self._failing.get(kind, f"{self._folder} has not answered yet"))

    def insist(self, act: Callable[[], T], seconds: float) -> T:
        """What `act` returns on the disk's thread, repeated for so long. Raises its last error."""
        until = time.monotonic() + seconds
        while True:
            work = _Work(None, act, True)
            self._queue.put(work)
            if not work.over.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"{self._folder} has not answered for {seconds:g} s")
            if work.error is None:
                return work.answer  # type: ignore[no-any-return]
            passing = isinstance(work.error, OSError) and work.error.errno not in LASTING
            if not passing or time.monotonic() > until:
                raise work.error

    def _note(self, kind: str, error: str) -> None:
        """Reports that the disk fails, and later that it works again."""
        before = bool(self._failing)
        if error:
            self._failing[kind] = error
        elif kind in self._failing:
            del self._failing[kind]
        if error and not before:
            self._tell(f"the disk fails: {error}; the job goes on, and farandole tries again")
        elif before and not self._failing:
            self._tell(f"the disk works again ({self._folder})")

    def _serve(self) -> None:
        pause = _PAUSES[0]
        while True:
            work = self._queue.get()
            try:
                work.answer = work.act()
                pause = _PAUSES[0]
            except Exception as reason:
                work.error = reason
                if isinstance(reason, OSError):
                    time.sleep(pause)
                    pause = min(2 * pause, _PAUSES[1])
            work.over.set()
            if not work.quiet:
                self._wake()
