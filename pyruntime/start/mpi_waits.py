# SPDX-License-Identifier: Apache-2.0
"""How init() waits in MPI, which has no wait with a deadline: it polls, and ranks that give up tell
each other why."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

from farandole.errors import PeerError, StallError
from farandole.start.bootstrap import REMEDY

__all__ = ["LONGEST_PAUSE", "Notes", "Wait"]

LONGEST_PAUSE = 0.005  # seconds between two looks
_ROLL_CALL = 1.0  # seconds for the others to say that they have waited too
_NOTE_TAG = 29_423


class Notes:
    """What ranks that give up in init() tell each other, on a communicator of which only they know
    that nobody else listens: nothing is sent while all goes well."""

    _sent: ClassVar[list[Any]] = []  # requests with their bytes: MPI may still read those
    _tried: ClassVar[set[object]] = set()

    def __init__(self, mpi: Any, comm: Any, members: Iterable[int], number: object) -> None:
        """`number` tells a meeting from others on the same communicator, alike on all ranks; None:
        the communicator is of one meeting only."""
        self.mpi, self._comm, self._number = mpi, comm, number
        self.own = comm.Get_rank()
        self.others = [rank for rank in members if rank != self.own]
        self._heard: dict[int, tuple[str, str]] = {}
        if number in self._tried:  # and gave up: whoever comes now may count on this rank again
            self.tell("back")
        elif number is not None:
            self._tried.add(number)

    def tell(self, kind: str, text: str = "") -> None:
        """`kind`: "waited" in vain, "failed" with this text, or "back" to try again."""
        note = pickle.dumps((self._number, kind, text))
        self._sent.extend((self._comm.Isend(note, rank, _NOTE_TAG), note) for rank in self.others)

    def heard(self) -> dict[int, tuple[str, str]]:
        """Who has told that it failed, or waited in vain, and has not come back."""
        status = self.mpi.Status()
        while (found := self._comm.Improbe(self.mpi.ANY_SOURCE, _NOTE_TAG, status)) is not None:
            data = bytearray(status.Get_count(self.mpi.BYTE))
            found.Recv(data)
            number, kind, text = pickle.loads(data)
            if number == self._number:
                self._heard[status.Get_source()] = (kind, text)
        return {rank: said for rank, said in self._heard.items() if said[0] != "back"}

    def roll_call(self) -> list[int]:
        """Of all that wait as this rank does: who does not."""
        self.tell("waited")
        deadline = time.monotonic() + _ROLL_CALL
        while len(self.heard()) < len(self.others) and time.monotonic() < deadline:
            time.sleep(LONGEST_PAUSE)
        return [rank for rank in self.others if rank not in self.heard()]


class Wait:
    """The waits of one init(): each ends in time, by its own success or with a reason."""

    def __init__(self, notes: Notes, seconds: float, check: Callable[[], None]) -> None:
        """`check` raises where a rank is known not to come."""
        self.notes = notes
        self._seconds = seconds
        self._check = check
        self.told = False  # nobody waits for this rank any more without knowing why

    def until(self, done: Callable[[], object], seconds: float | None = None) -> None:
        """Returns when `done()` is true. Raises StallError after `seconds`, or with those who gave
        up before; PeerError for a rank that failed."""
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
                self.told = True
                raise PeerError(f"init(): rank {rank} failed there: {text}")
        if heard:
            self._give_up(f"as long as {ranks_text(heard)} waited")

    def _give_up(self, when: str) -> NoReturn:
        self.told = True
        missing = self.notes.roll_call()
        if missing:
            raise StallError(
                f"init(): {ranks_text(missing)} did not come to the meeting of all ranks {when}; "
                f"{REMEDY}"
            )
        raise StallError(
            f"init(): rank {self.notes.own} came when the others had given up waiting; {REMEDY}"
        )


def ranks_text(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))
