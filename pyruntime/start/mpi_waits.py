# SPDX-License-Identifier: Apache-2.0
"""Waits for MPI with a deadline, which MPI itself lacks.

init() polls, and a rank that gives up tells the others why. mpi_ranks.py uses it on its thread.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

from farandole.errors import PeerError, StallError, ranks_text
from farandole.start.bootstrap import REMEDY

LONGEST_PAUSE = 0.005  # seconds between two polls
_REPLY_SECONDS = 1.0  # seconds within which others may report that they have waited as well
_NOTE_TAG = 29_423


class Notes:
    """Messages between ranks that give up in init(). They are sent only if something fails."""

    _sent: ClassVar[list[Any]] = []  # requests and their bytes, which MPI may still read
    _tried: ClassVar[set[object]] = set()

    def __init__(self, mpi: Any, comm: Any, members: Iterable[int], number: object) -> None:
        """`number` identifies this bootstrap on the communicator and is equal on all ranks.

        It is None if this is the communicator's only bootstrap.
        """
        self.mpi, self._comm, self._number = mpi, comm, number
        self.own = comm.Get_rank()
        self.others = [rank for rank in members if rank != self.own]
        self._heard: dict[int, tuple[str, str]] = {}
        if number in self._tried:  # this rank has given up before, and retries
            self.tell("back")
        elif number is not None:
            self._tried.add(number)

    def tell(self, kind: str, text: str = "") -> None:
        """Sends `kind` to the others.

        "waited" means that this rank has waited too long. "failed" means that it has failed, for
        the reason in `text`. "back" means that it tries again.
        """
        note = pickle.dumps((self._number, kind, text))
        self._sent.extend((self._comm.Isend(note, rank, _NOTE_TAG), note) for rank in self.others)

    def heard(self) -> dict[int, tuple[str, str]]:
        """Returns (kind, text) by rank, for ranks that have failed or waited and are not back."""
        status = self.mpi.Status()
        while (found := self._comm.Improbe(self.mpi.ANY_SOURCE, _NOTE_TAG, status)) is not None:
            data = bytearray(status.Get_count(self.mpi.BYTE))
            found.Recv(data)
            number, kind, text = pickle.loads(data)
            if number == self._number:
                self._heard[status.Get_source()] = (kind, text)
        return {rank: said for rank, said in self._heard.items() if said[0] != "back"}

    def silent_ranks(self) -> list[int]:
        """Tells the others that this rank has waited too long. Returns the ranks without reply."""
        self.tell("waited")
        deadline = time.monotonic() + _REPLY_SECONDS
        while len(self.heard()) < len(self.others) and time.monotonic() < deadline:
            time.sleep(LONGEST_PAUSE)
        return [rank for rank in self.others if rank not in self.heard()]


class Wait:
    """The waits of one init()."""

    def __init__(
        self, notes: Notes, seconds: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` is called at each poll. It raises an error if a rank is known not to come."""
        self.notes = notes
        self._seconds = seconds
        self._check = check
        self.reported = False  # True once the others know that this rank has given up

    def until(self, done: Callable[[], object], seconds: float | None = None) -> None:
        """Waits until `done()` is true.

        Raises StallError after `seconds` or if others have given up, and PeerError if a rank has
        failed.
        """
        limit = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        pause = 0.0
        while not done():
            self._check()
            self._listen()
            if time.monotonic() > deadline:
                self._give_up(f"within {limit:g} s")
            time.sleep(pause)
            pause = min(pause + 0.0001, LONGEST_PAUSE)

    def _listen(self) -> None:
        heard = self.notes.heard()
        for rank, (kind, text) in heard.items():
            if kind == "failed":
                self.reported = True
                raise PeerError(f"init(): rank {rank} failed there: {text}")
        if heard:
            self._give_up(f"as long as {ranks_text(heard)} waited")

    def _give_up(self, when: str) -> NoReturn:
        self.reported = True
        missing = self.notes.silent_ranks()
        if missing:
            raise StallError(
                f"init(): {ranks_text(missing)} did not come to the rendezvous of all ranks "
                f"{when}; {REMEDY}"
            )
        raise StallError(
            f"init(): rank {self.notes.own} came after the others had given up waiting; {REMEDY}"
        )
