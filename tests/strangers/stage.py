# SPDX-License-Identifier: Apache-2.0
"""What ranks know of each other beside the runtime: who runs, who waits, who comes last."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

__all__ = ["TIMEOUT", "Stage"]

TIMEOUT = 0.004  # seconds, of a wait that may end before its call
_RUNS, _WAITS, _LATE, _DONE = range(4)
_PATIENCE = 3.0  # seconds; the others may be busy, not stuck


class Stage:
    """One byte for each rank in memory that they share."""

    def __init__(self, shared: mmap, rank: int, ranks: int) -> None:
        self._shared = shared
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        self.doing = ""  # the instruction that runs

    def begin(self) -> None:
        """A new program."""
        self._shared[self._rank] = _RUNS

    def end(self) -> None:
        """Nobody waits for this rank any more."""
        self._shared[self._rank] = _DONE

    def now(self, doing: str) -> None:
        """For reports."""
        self.doing = doing

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """While this rank waits for others without limit."""
        self._shared[self._rank] = _WAITS
        try:
            yield
        finally:
            self._shared[self._rank] = _RUNS

    def come_last(self) -> None:
        """Returns when no other rank can go on by itself."""
        self._shared[self._rank] = _LATE
        end = time.monotonic() + _PATIENCE
        while any(self._shared[other] == _RUNS for other in self._others):
            if time.monotonic() > end:
                break
            time.sleep(0.0002)  # nobody tells: a rank that waits is inside the runtime
        self._shared[self._rank] = _RUNS
