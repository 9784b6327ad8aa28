# SPDX-License-Identifier: Apache-2.0
"""From one world of an elastic job to the next, in the same process. For a call of elastic
training, on its thread."""

from __future__ import annotations

import contextlib

from farandole import runtime, topology
from farandole._library import check, lib
from farandole.errors import StallError, counted
from farandole.membership.words import NOTHING, World
from farandole.start import agency

_HANGS = 0.2  # seconds that the others have to leave when it is known that one will not
_LINES = 12  # of the story that are kept


class Worlds:
    """The worlds of one call of elastic training. `agent` hears of commits, and tells of others."""

    def __init__(self, agent: agency.Agency) -> None:
        self.agent = agent
        self.start = World()  # the present one, and the commit from which it starts

    @classmethod
    def of_job(cls) -> Worlds | None:
        """Those of the present job; None: its ranks stay the same, or end together."""
        agent = agency.connect()
        return None if agent is None else cls(agent)

    def begin(self) -> bool:
        """Enters the world of the others, if this process is not in one; returns whether it has."""
        if not self.agent.alone:
            self.start = self._present()
            return False
        runtime.leave_anew()
        self.agent.alone = False
        self.agent.leave(met=True)
        self._enter()
        return True

    def ended(self) -> bool:
        """For a rank whose training has come to its end: waits until all others' has, too; False
        if it has to go on with some, in another world. It enters that by go_on()."""
        self.agent.leave(finished=True)
        return self.agent.ended()

    def go_on(self, error: BaseException | None) -> None:
        """Enters the next world, after an error, or None: because all have met."""
        met, stalled = error is None, isinstance(error, StallError)
        with contextlib.suppress(StallError):  # whoever does not leave is ended
            runtime.leave_anew(_HANGS if stalled else runtime.patience())
        self.agent.leave(met=met, stalled=stalled)
        self._enter()

    def _enter(self) -> None:
        before = self.start
        runtime.init()
        self.start = self._present()
        _tell(before, self.start)

    def _present(self) -> World:
        met_by = runtime.met_by()
        return met_by.world if isinstance(met_by, agency.AgencyBootstrap) else World()


def _tell(before: World, now: World) -> None:
    """Keeps in the flight recorder how the present world came about."""
    verb = "goes" if topology.size() == 1 else "go"
    text = f"world {now.number}: {counted(topology.size(), 'rank')} {verb} on"
    changes = [text + f" from commit {now.start.number}" * (now.start != NOTHING)]
    gone = [rank for rank, name in enumerate(before.members) if name not in now.members]
    joined = len(set(now.members) - set(before.members))
    if gone:
        what = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        changes.append(f"of world {before.number} {what} {'is' if len(gone) == 1 else 'are'} gone")
    if joined and before.members:
        changes.append(f"{counted(joined, 'rank')} joined")
    _story.append("; ".join(changes if before.members else [*changes, "this rank joined"]))
    del _story[:-_LINES]
    check(lib.farandole_story("\n".join(_story).encode()))


_story: list[str] = []
