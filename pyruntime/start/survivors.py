# SPDX-License-Identifier: Apache-2.0
"""How the ranks of an elastic job that live meet under ULFM, and agree on the next world. For
restarts, on their thread; MPI's blocking calls run on a thread `farandole.init`, to have a limit.

They send each other messages and agree on one communicator as long as only ranks die: where a death
falls into the making of a communicator, MPIX_Comm_shrink included, Open MPI 5.0.11 may crash.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from farandole.errors import LibraryError, PeerError, StallError, ranks_text
from farandole.start.bootstrap import REMEDY
from farandole.start.joining import take_in
from farandole.start.mpi_waits import LONGEST_PAUSE
from farandole.start.recruits import RECRUITS_SHARE, Recruits

_TAG = 29_424  # of all messages
_TRIES = 100  # agreements that may fail, each because of another death
_WORD = 31  # ranks in one agreement
_ULFM = "OMPI_MCA_mpi_ft_enable"  # Open MPI's mpirun sets it
_ON = ("1", "true", "yes", "on", "enabled")

About = tuple[Any, ...]  # what a message is about, equal on its two ends


def outlives_deaths() -> bool:
    """Whether mpirun was told `--with-ft ulfm`: only then do ranks outlive the death of another."""
    return os.environ.get(_ULFM, "").lower() in _ON


def dead_ranks(mpi: Any, comm: Any) -> list[int]:
    """Ranks of a communicator of which MPI knows that they have died; always [] without ULFM."""
    if not outlives_deaths():
        return []
    failed, everyone = comm.Get_failed(), comm.Get_group()
    found = mpi.Group.Translate_ranks(failed, None, everyone)
    failed.Free()
    everyone.Free()
    return sorted(found)


def died_in_init(dead: list[int]) -> PeerError:
    """The error of a rank whose init() these ranks have ended by their deaths."""
    return PeerError(
        f"init(): {ranks_text(dead)} died while the ranks met; see the output there for the reason "
        "(killed, out of memory, crashed?); or the network between the hosts is down"
    )


class Mail:
    """Messages between ranks of a communicator, of which some may have died."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi, self.comm = mpi, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._sent: list[Any] = []  # requests and their bytes, which MPI may still read
        self._kept: dict[About, dict[int, Any]] = defaultdict(dict)

    def send(self, to: Iterable[int], about: About, what: Any) -> None:
        """Sends it to these ranks, itself excepted; does not block."""
        note = pickle.dumps((about, what))
        for rank in to:
            with contextlib.suppress(self.mpi.Exception):  # it is dead
                if rank != self.rank:
                    self._sent.append((self.comm.Isend(note, rank, _TAG), note))

    def heard(self, about: About) -> dict[int, Any]:
        """What has come about this, by sender."""
        status = self.mpi.Status()
        try:
            while found := self.comm.Improbe(self.mpi.ANY_SOURCE, _TAG, status):
                data = bytearray(status.Get_count(self.mpi.BYTE))
                found.Recv(data)
                topic, what = pickle.loads(data)
                self._kept[topic][status.Get_source()] = what
        except self.mpi.Exception:  # a rank has died: after this, others can be heard again
            self.comm.Ack_failed()
        return self._kept[about]

    def dead(self) -> set[int]:
        """Ranks of which MPI knows that they have died."""
        return set(dead_ranks(self.mpi, self.comm))

    def agree(self, flags: int) -> int:
        """The flags that all that live have set, once nobody has died meanwhile; collective."""
        for _ in range(_TRIES):
            self.comm.Ack_failed()
            with contextlib.suppress(self.mpi.Exception):  # on all of them: a death is new to one
                return int(self.comm.Agree(flags))
        raise LibraryError("elastic training: MPIX_Comm_agree fails again and again")


class Standing(NamedTuple):
    """What a rank brings along to the next world."""

    commits: int  # the number of its last commit; less than 0: it has no state
    finished: bool  # its training function has returned
    recruits: int = 0  # processes that it has started, and that wait to be taken in


class NextWorld(NamedTuple):
    """What those that live have agreed on; equal on all of them."""

    survivors: Survivors
    stays: bool  # all have finished, and nobody has died: there is no next world
    commits: int  # the number of the newest commit, which rank 0 has
    finished: bool  # all have
    dead: list[int]  # ranks of the world before


class Survivors:
    """The ranks of one world: `members` are their ranks in the communicator, in the world's order.

    Each call of next_world() is a meeting, to which all come that live.
    """

    def __init__(self, mail: Mail, members: list[int], seconds: float, number: int = 0) -> None:
        """`seconds`: how long those that have come wait for the others; `number`: of the last
        meeting on this communicator."""
        self.mail, self.members, self.seconds = mail, members, seconds
        self.number = number

    def leave(self, cause: str) -> None:
        """Tells the others that this rank comes to no further meeting."""
        self.mail.send(self.members, ("leaves", self.number), cause)

    def next_world(self, own: Standing, recruits: Recruits, check: Callable[[], None]) -> NextWorld:
        """Agrees on the next world; collective over the ranks that live.

        The present one stays if all have finished and nobody has died. Raises StallError, naming
        those that do not come, PeerError for one that has left, and what `check` raises meanwhile.
        """
        told = self._meet(own, check)
        outcome: list[NextWorld] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                outcome.append(self._decide(told, recruits))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="farandole.init", daemon=True)
        thread.start()
        thread.join(self.seconds * RECRUITS_SHARE)
        if thread.is_alive():
            recruits.abandon()
            thread.join(self.seconds * (1 - RECRUITS_SHARE))
        if thread.is_alive():
            raise StallError(
                f"elastic training: the ranks that live did not agree within {self.seconds:g} s on "
                f"the next world; {REMEDY}"
            )
        if errors:
            raise LibraryError(f"elastic training: {errors[0]}") from errors[0]
        return outcome[0]

    def _meet(self, own: Standing, check: Callable[[], None]) -> dict[int, Standing]:
        """Waits for all others that live; returns what they bring along."""
        self.number += 1
        about = ("comes", self.number)
        self.mail.send(self.members, about, tuple(own))
        deadline = time.monotonic() + self.seconds
        pause = 0.0
        while True:
            came = self.mail.heard(about)
            missing = set(self.members) - came.keys() - self.mail.dead() - {self.mail.rank}
            if not missing:
                found = {rank: Standing(*each) for rank, each in came.items()}
                return {**found, self.mail.rank: own}
            check()
            gone = self.mail.heard(("leaves", self.number - 1))  # before it came to this meeting
            gone = {**gone, **self.mail.heard(("leaves", self.number))}
            for rank in sorted(missing & gone.keys()):
                place = self.members.index(rank)
                raise PeerError(f"rank {place} left: {gone[rank]}; it does not come back")
            if time.monotonic() > deadline:
                places = [self.members.index(rank) for rank in missing]
                raise StallError(
                    f"elastic training: {ranks_text(places)} did not come within {self.seconds:g} "
                    f"s to go on with the others; {REMEDY}"
                )
            time.sleep(pause)
            pause = min(pause + 0.0001, LONGEST_PAUSE)

    # ---- the agreement, on the thread

    def _living(self, told: dict[int, Standing]) -> list[int]:
        """The members that all know to live, ascending; the same on all."""
        members = sorted(self.members)
        while True:
            lives = set(told) - self.mail.dead()
            found = []
            for first in range(0, len(members), _WORD):
                part = members[first : first + _WORD]
                flags = self.mail.agree(sum((rank in lives) << i for i, rank in enumerate(part)))
                found += [rank for i, rank in enumerate(part) if flags >> i & 1]
            if self.mail.agree(int(not self.mail.dead() & set(found))):
                return found

    def _decide(self, told: dict[int, Standing], recruits: Recruits) -> NextWorld:
        living = self._living(told)
        brought = [told[rank] for rank in living]
        finished = all(each.finished for each in brought)
        newest = max(each.commits for each in brought)
        dead = [place for place, rank in enumerate(self.members) if rank not in living]
        order = [rank for rank in self.members if rank in living]
        first = next(rank for rank in order if told[rank].commits == newest)
        order.sort(key=lambda rank: rank != first)
        following = self
        if dead or not finished:
            following = Survivors(self.mail, order, self.seconds, self.number)
            if not finished and any(each.recruits for each in brought):
                following = self._grow(following, told, newest, recruits)
        return NextWorld(following, following is self, newest, finished, dead)

    def _grow(
        self, without: Survivors, told: dict[int, Standing], newest: int, recruits: Recruits
    ) -> Survivors:
        """The next world with those that wait, or without, if that fails."""
        mpi, living = self.mail.mpi, sorted(without.members)
        sponsors = [place for place, r in enumerate(living) for _ in range(told[r].recruits)]
        made = None
        with contextlib.suppress(mpi.Exception):  # a rank has died, perhaps one that was to join
            # Not the one for mail, which must outlive that.
            made = take_in(mpi, self.mail.comm.Shrink(), sponsors, recruits.pairs)
        members = [living.index(rank) for rank in without.members]
        members += range(len(living), len(living) + len(sponsors))
        agreed = bool(self.mail.agree(int(made is not None)))
        recruits.settle(agreed, (members, newest))
        return Survivors(Mail(mpi, made), members, self.seconds) if agreed else without
