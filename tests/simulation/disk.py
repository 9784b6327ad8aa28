# SPDX-License-Identifier: Apache-2.0
"""The disk of a simulated elastic job, which fails and is slow, and the ranks' writers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from farandole.commits import _PATIENCE, NotSaved, Saved, Writer
from farandole.membership.messages import Commit
from farandole.trust import Folder
from simulation.book import Book

__all__ = ["Disk", "Saver"]

ERRORS = errno.ENOSPC, errno.EIO, errno.ESTALE
ATTEMPTS = 1, 1, 2, 3, 8, 30  # that fail one after another; a writer makes 7 of a last commit
SYNC_FAILS = 0.1  # failures that come after the file was replaced
SLOW = 15.0  # seconds


class Disk:
    """The folder of the job's commits."""

    def __init__(self, random: Random, book: Book) -> None:
        self._random, self._book = random, book
        self._rate = random.choice([0.0, 0.05, 0.4])  # of failures
        self._slow = random.choice([0.0, 0.2, 0.5])  # rate of attempts in the background
        self.at_once = random.random() < 0.3  # FARANDOLE_CHECKPOINT_SECONDS is 0
        self._failures: list[int] = []  # of the next attempts

    def store(
        self, folder: Path, saved: Saved, commit: Commit, make: bool, above: Folder, ordered: bool
    ) -> None:
        """Replaces write_commit()."""
        random, reason = self._random, 0
        if not self._failures and random.random() < self._rate:
            self._failures = [random.choice(ERRORS)] * random.choice(ATTEMPTS)
        if self._failures:
            reason = self._failures.pop()
        outdated = ordered and self._book.disk > commit
        if not outdated and (reason == 0 or random.random() < SYNC_FAILS):
            self._book.put(commit, saved.values["count"])
        if reason:
            raise OSError(reason, os.strerror(reason))

    def pause(self, background: bool) -> float:
        """Seconds before an attempt. An attempt itself takes no time."""
        slow = background and self._random.random() < self._slow
        return self._random.uniform(0, SLOW if slow else 0.5)


class Saver:
    """A rank's Writer. Each attempt is an event of the simulation."""

    def __init__(self, process: Any) -> None:
        self._process, self._simulation = process, process.node.simulation
        disk, simulation = self._simulation.disk, self._simulation
        folder = Path("job", "call-1")
        self._writer = Writer(folder, False, disk.store, lambda: simulation.now, self._say)
        self._fails = False
        self.runs = False  # the background thread
        self.writes = self.has_written = False  # the training thread
        self._then: Callable[[], None] | None = None  # waits for the background thread

    def _say(self, text: str) -> None:
        assert ("not saved" in text) is not self._fails, "it says the same twice"
        self._fails = not self._fails

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        pause = self._simulation.disk.pause(background=self.runs)
        self._simulation.later(seconds + pause, action)

    def begin(self, count: int, commit: Commit) -> None:
        if self._writer.ask(Saved({"count": count}), commit, last=True):
            assert not self.runs, "two threads"
            self.runs = True
            self._later(0.0, self._go_on)

    def _go_on(self) -> None:
        """The thread, which may live on while the process hangs."""
        if not self._process.lives:
            return
        far = self._simulation.is_cut(self._process.node.host)  # the disk is on another host
        if far and self._simulation.random.random() < 0.5:
            self._later(0.0, self._go_on)
            return
        pause, _ = self._attempt()
        if pause is not None:
            self._later(pause, self._go_on)
            return
        self.runs, then, self._then = False, self._then, None
        if then is not None and self._process.can_act():
            then()

    def _attempt(self) -> tuple[float | None, bool]:
        """Returns (pause before the next attempt or None, False if the writer gives up)."""
        try:
            return self._writer.attempt(), True
        except NotSaved:
            return None, False

    def join(self, then: Callable[[], None]) -> None:
        self._then = then

    def write(self, count: int, commit: Commit, last: bool, then: Callable[[], None]) -> None:
        """Calls `then` once this commit is on the disk, or the writer has raised NotSaved."""
        self.writes = self.has_written = True
        if self.runs:
            self.join(partial(self.write, count, commit, last, then))
            return

        begun = self._simulation.now

        def attempt() -> None:
            if not self._process.can_act():
                return
            pause, saved = self._attempt()
            if last and not saved:  # it has waited, except for the next pause, the longest one
                assert self._simulation.now > begun + _PATIENCE / 2 - 0.1, "it gives up early"
                self._simulation.book.unsaved.add(commit)
            if pause is not None:
                self._later(pause, attempt)
                return
            self.writes = False
            then()

        assert self._writer.ask(Saved({"count": count}), commit, last), "an attempt is under way"
        self._later(0.0, attempt)
