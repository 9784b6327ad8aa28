# SPDX-License-Identifier: Apache-2.0
"""The bootstrap of those ranks of an MPI job that live, under ULFM: messages between them, since
MPI's collectives need all. For init(), on its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from farandole.errors import PeerError, StallError, ranks_text
from farandole.start import leaving
from farandole.start.bootstrap import GRACE, REMEDY, Bootstrap, Farewell, Parting
from farandole.start.mpi_ranks import abort
from farandole.start.mpi_waits import LONGEST_PAUSE
from farandole.start.survivors import Survivors, died_in_init


class Living(Bootstrap):
    """A Bootstrap of the members of a world that Survivors have agreed on."""

    def __init__(self, survivors: Survivors) -> None:
        self.survivors, self.seconds = survivors, survivors.seconds
        self.mpi = survivors.mail.mpi
        self._mail, self._members = survivors.mail, survivors.members
        self._number = survivors.number  # a world's own: each has one meeting before it
        self._steps = 0
        self.rank, self.size = self._members.index(self._mail.rank), len(self._members)
        names = self.allgather(self.mpi.Get_processor_name().encode())
        self.node = [names.index(name) for name in names]

    def allgather(self, data: bytes, seconds: float | None = None) -> list[bytes]:
        """As in Bootstrap."""
        self._steps += 1
        about = ("init", self._number, self._steps)
        limit = self.seconds if seconds is None else seconds
        self._mail.send(self._members, about, data)
        missing = self._await(about, limit, self._check)
        if missing:
            raise StallError(
                f"init(): {ranks_text(missing)} did not come to the rendezvous of all ranks within "
                f"{limit:g} s; {REMEDY}"
            )
        heard = self._mail.heard(about)
        return [data if r == self._mail.rank else heard[r] for r in self._members]

    def _await(
        self, about: tuple[Any, ...], seconds: float, check: Callable[[], object]
    ) -> list[int]:
        """Waits for messages of all others; returns the ranks that have sent none in time, or when
        `check` returns true."""
        deadline = time.monotonic() + seconds
        pause = 0.0
        while True:
            heard = self._mail.heard(about)
            missing = [
                place
                for place, rank in enumerate(self._members)
                if rank not in heard and place != self.rank
            ]
            if not missing or check() or time.monotonic() > deadline:
                return missing
            time.sleep(pause)
            pause = min(pause + 0.0001, LONGEST_PAUSE)

    def _check(self) -> None:
        """Raises PeerError if a rank has failed or died."""
        for rank, text in self._mail.heard(("failed", self._number)).items():
            raise PeerError(f"init(): rank {self._members.index(rank)} failed there: {text}")
        if dead := self._dead():
            raise died_in_init(dead)

    def _dead(self) -> list[int]:
        dead = self._mail.dead()
        return [place for place, rank in enumerate(self._members) if rank in dead]

    def world_ranks(self, comm: Any) -> list[int]:
        """As in Bootstrap."""
        everyone = self._mail.comm.Get_group()
        ranks = self.mpi.Group.Translate_ranks(comm.Get_group(), None, everyone)
        if not set(ranks) <= set(self._members):
            raise ValueError("the communicator holds processes that are not in farandole's world")
        return sorted(self._members.index(rank) for rank in ranks)

    def threads_supported(self) -> bool:
        """Whether several threads may call MPI at once."""
        return bool(self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE)

    def close(self, farewell: Farewell, failed: bool, broken: bool) -> Parting:
        """As in Bootstrap. If this rank failed and others live on, MPI ends the job."""
        about = ("leaves world", self._number)
        if self.mpi.Is_finalized():
            return Parting(farewell, lambda: None)
        self._mail.send(self._members, about, farewell)
        missing = self._await(about, GRACE, self._dead)
        if failed and missing and not self._dead():
            abort(self.mpi, self.rank)

        def all_said() -> list[Farewell] | None:
            heard = {**self._mail.heard(about), self._mail.rank: farewell}
            complete = all(rank in heard for rank in self._members)
            return [heard[rank] for rank in self._members] if complete else None

        return Parting(farewell, all_said)

    def abandon(self, reason: BaseException) -> None:
        """As in Bootstrap."""
        self._mail.send(self._members, ("failed", self._number), leaving.describe(reason))
