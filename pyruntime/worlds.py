# SPDX-License-Identifier: Apache-2.0
"""Moves this process between worlds of an elastic job. Used by elastic.py, on the training
thread."""

from __future__ import annotations

import contextlib

from farandole import runtime, topology
from farandole._library import check, lib
from farandole.errors import StallError, counted
from farandole.membership.messages import NOTHING, World
from farandole.start import agent_client

_HANGS = 0.2  # seconds that other ranks get to leave if one rank is known to hang
_LINES = 12  # number of lines of history that are kept


class Worlds:
    """The worlds of one elastic training call. `agent` exchanges messages with the host's agent."""

    def __init__(self, agent: agent_client.AgentClient) -> None:
        self.agent = agent
        self.start = World()  # the present world, including the commit from which it started

    @classmethod
    def of_job(cls) -> Worlds | None:
        """Returns the worlds of the present job, or None if the job's ranks never change."""
        agent = agent_client.connect()
        return None if agent is None else cls(agent)

    def begin(self) -> bool:
        """If this process is alone, joins the world of the other ranks and returns True."""
        if not self.agent.alone:
            self.start = self._present()
            return False
        runtime.leave_for_restart()
        self.agent.alone = False
        self.agent.leave(met=True)
        self._enter()
        return True

    def ended(self) -> bool:
        """Waits until all ranks have finished training.

        Returns False if other ranks need this rank in another world. In that case, call
        go_on(None).
        """
        self.agent.leave(finished=True)
        return self.agent.ended()

    def go_on(self, error: BaseException | None) -> None:
        """Leaves the present world in the same way as leave() and joins the next one."""
        self.leave(error)
        self.agent.leave(met=error is None, stalled=isinstance(error, StallError))
        self._enter()

    def leave(self, error: BaseException | None) -> None:
        """Leaves the present world after `error`, which is None if all ranks agreed to leave."""
        stalled = isinstance(error, StallError)
        with contextlib.suppress(StallError):  # the agents end ranks that do not leave
            runtime.leave_for_restart(_HANGS if stalled else runtime.exit_timeout())

    def _enter(self) -> None:
        before = self.start
        runtime.init()
        self.start = self._present()
        _record(before, self.start)

    def _present(self) -> World:
        bootstrap = runtime.current_bootstrap()
        return bootstrap.world if isinstance(bootstrap, agent_client.ElasticBootstrap) else World()


def _record(before: World, now: World) -> None:
    verb = "goes" if topology.size() == 1 else "go"
    text = f"world {now.number}: {counted(topology.size(), 'rank')} {verb} on"
    changes = [text + f" from commit {now.start.number}" * (now.start != NOTHING)]
    gone = [rank for rank, name in enumerate(before.members) if name not in now.members]
    joined = len(set(now.members) - set(before.members))
    if gone:
        what = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        changes.append(f"{what} of world {before.number} {'is' if len(gone) == 1 else 'are'} gone")
    if joined and before.members:
        changes.append(f"{counted(joined, 'rank')} joined")
    _history.append("; ".join(changes if before.members else [*changes, "this rank joined"]))
    del _history[:-_LINES]
    check(lib.farandole_story("\n".join(_history).encode()))


_history: list[str] = []
