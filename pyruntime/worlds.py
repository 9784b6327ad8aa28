# SPDX-License-Identifier: Apache-2.0
"""Elastic training under ULFM: from one world to the next, in the same processes. For a call of
elastic training, on its thread."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from farandole import runtime, topology
from farandole._library import check, lib
from farandole.config import setting
from farandole.errors import RETRIED, LibraryError, PeerError, StallError, counted, ranks_text
from farandole.start import joining, recruits
from farandole.start.living import Living
from farandole.start.mpi_ranks import Mpi
from farandole.start.survivors import Mail, NextWorld, Standing, Survivors, outlives_deaths

_COLL, _NO_HAN = "OMPI_MCA_coll", "^han"
_NONE = -1  # the commits of a rank that has no state
_TRIES = 3  # worlds that may fail one after the other before they have begun


class Worlds:
    """The worlds of one call of elastic training."""

    def __init__(self, job: Mpi | Living) -> None:
        self._survivors = job.survivors
        self._recruits = recruits.Recruits(job.mpi, job.survivors.seconds)
        self._least = int(setting("FARANDOLE_MIN_NP"))
        self._most = int(setting("FARANDOLE_MAX_NP"))

    @classmethod
    def of_job(cls) -> Worlds | None:
        """Those of the present job; None if its ranks do not outlive the death of another."""
        job = runtime.met_by()
        if not outlives_deaths() or not isinstance(job, (Mpi, Living)):
            return None
        grows = int(setting("FARANDOLE_MAX_NP")) > 0
        if grows and _NO_HAN not in os.environ.get(_COLL, ""):
            raise LibraryError(
                "FARANDOLE_MAX_NP: Open MPI's component han hangs in communicators of ranks that "
                f"have joined; remedy: mpirun --mca coll {_NO_HAN}"
            )
        if grows and not job.threads_supported():
            raise LibraryError(
                "FARANDOLE_MAX_NP: a thread starts new ranks, and MPI does not let several threads "
                "call it; remedy: leave mpi4py.rc.thread_level as it is ('multiple')"
            )
        return cls(job)

    def tend(self) -> bool:
        """Starts new ranks where some are missing; returns whether one waits to be taken in."""
        missing = self._most - topology.size() if topology.rank() == 0 else 0
        return self._recruits.tend(missing)

    def join(self) -> NextWorld:
        """Waits until the job takes this process in. Raises joining.Away."""
        try:
            seconds = self._survivors.seconds * recruits.RECRUITS_SHARE
            comm, members, commits = joining.join(seconds)
        except joining.Away:
            Mpi.end_without_mpi()  # MPI_Finalize would wait for that of the rank that started it
            raise
        mail = Mail(self._survivors.mail.mpi, comm)
        survivors = Survivors(mail, members, self._survivors.seconds)
        return self._enter(NextWorld(survivors, False, commits, False, []), _NONE)

    def go_on(self, commits: int, finished: bool) -> NextWorld:
        """Enters the next world, with those that live and those that join; collective.

        `commits`: the number of this rank's last commit. The present world stays if all have
        finished and nobody has died. Raises PeerError if too few live, or if one has left for good;
        StallError if one does not come.
        """
        parting = None
        if not finished:
            with contextlib.suppress(StallError):  # the meeting names those that do not come
                parting = runtime.leave_anew(self._survivors.seconds)
        check = parting.check if parting is not None else _nothing
        own = Standing(commits, finished, self._recruits.offer())
        found = self._next(own, check)
        return found if found.stays else self._enter(found, commits)

    def _next(self, own: Standing, check: Callable[[], None]) -> NextWorld:
        try:
            return self._survivors.next_world(own, self._recruits, check)
        except StallError:
            Mpi.strand()  # a stopped rank, say, would keep mpirun for ever
            raise

    def _enter(self, found: NextWorld, commits: int) -> NextWorld:
        tries, before = 0, runtime.world()
        changes: list[str] = []
        while True:
            if commits != _NONE:  # else it has not been there
                changes += self._changes(found, before if tries == 0 else None)
            with contextlib.suppress(StallError):
                runtime.leave_anew(self._survivors.seconds)
            self._survivors = found.survivors
            self._judge(found)
            try:
                runtime.init(Living(found.survivors))
                break
            except RETRIED:
                tries += 1
                if tries > _TRIES:
                    raise
            own = Standing(commits, False)
            found = self._next(own, _nothing)
        self._most = int(setting("FARANDOLE_MAX_NP"))
        if topology.rank() != 0:
            self._recruits.dismiss()  # rank 0 starts new ones
        _tell(found, commits, changes)
        return found

    def _changes(self, found: NextWorld, world: int | None) -> list[str]:
        """What is told of the way to the next world, of `world`'s ranks; None: of one that never
        began."""
        died = counted(len(found.dead), "rank") if world is None else ranks_text(found.dead)
        where = "while the others met" if world is None else f"of world {world}"
        joined = len(found.survivors.members) - len(self._survivors.members) + len(found.dead)
        told = [f"{where} {died} died"] if found.dead else []
        return told + ([f"{counted(joined, 'rank')} joined"] if joined > 0 else [])

    def _judge(self, found: NextWorld) -> None:
        """Raises PeerError, on all ranks, where training can't go on."""
        size = len(found.survivors.members)
        dead = ranks_text(found.dead) if found.dead else "nobody"
        if size < self._least:
            raise PeerError(
                f"{counted(size, 'rank')} left, of FARANDOLE_MIN_NP={self._least}: {dead} has died"
            )
        if found.commits == _NONE and found.dead:
            raise PeerError(f"no living rank has the state: {dead} has died")

    def leave(self, cause: str) -> None:
        """Tells the others that this rank goes on in no further world."""
        self._survivors.leave(cause)

    def close(self) -> None:
        """Lets those end that wait to be taken in, and those that are on their way."""
        # Open MPI 5.0.11's MPI_Finalize waits for all that it has ever been connected to.
        if not self._recruits.close() or joining.grown():
            Mpi.end_without_mpi()


def _tell(found: NextWorld, commits: int, changes: list[str]) -> None:
    """Says how the present world came about, and keeps it in the flight recorder. `commits`: the
    number of this rank's last commit before."""
    verb = "goes" if topology.size() == 1 else "go"
    text = f"world {runtime.world()}: {counted(topology.size(), 'rank')} {verb} on from commit "
    text = "; ".join([text + str(found.commits), *changes])
    if topology.rank() == 0 and found.commits != _NONE:
        print(f"farandole: {text}", file=sys.stderr, flush=True)
    if commits == _NONE:
        text += "; this rank joined"
    elif commits != found.commits:
        text += f"; this rank had commit {commits}"
    _story.append(text)
    del _story[:-_LINES]
    check(lib.farandole_story("\n".join(_story).encode()))


def _nothing() -> None:
    pass


_LINES = 12  # of the story that are kept
_story: list[str] = []
