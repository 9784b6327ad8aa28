# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of one rank of an elastic job: its world, its commit, and whether it is waiting.
The package's docstring lists the states and their transitions."""

from __future__ import annotations

from farandole.membership.messages import NOTHING, Commit, View, WorkerState, World


class Member:
    """The state of one rank. The caller reports what the rank does, passes on messages from the
    rank's agent, and sends `state` to the agent whenever it has changed. This class is not
    thread-safe."""

    def __init__(self, name: str, over: int = 0) -> None:
        """`over` is the last world of an earlier program in this process. It is not entered
        again."""
        self.name = name
        self.state = WorkerState(over=over)
        self._view = View()
        self._world = World()

    def receive(self, view: View) -> None:
        """Applies a message from the agent. Messages arrive in order."""
        self._view = view
        over = max(self.state.over, view.over)
        self.state = self.state._replace(over=over)

    def wait(self, finished: bool = False, met: bool = False, stalled: bool = False) -> None:
        """Leaves the present world, if there is one, and waits for the next. If none of the three
        reasons is given, this rank has failed, and the other ranks' calls also fail."""
        call = self._view.done + 1 if finished else 0
        self.state = self.state._replace(away=True, finished=call, met=met, stalled=stalled)

    def stay(self) -> bool:
        """Returns True and stays in the present world if the finished call has ended on all
        ranks."""
        done = 0 < self.state.finished <= self._view.done
        if done:
            self.state = self.state._replace(away=False, finished=0)
        return done

    def is_awaited(self) -> bool:
        """Returns True if this rank is waiting and is a member of the next world."""
        world = self._view.world
        decided = world.number > max(self.state.world, self.state.over)
        return self.state.away and decided and self.name in world.members

    def enter(self) -> World | None:
        """Enters the next world and returns it. Returns None if this rank has no next world yet."""
        if not self.is_awaited():
            return None
        world = self._view.world
        self._world = world
        before = self.state
        self.state = WorkerState(world.number, False, before.over, before.commit)
        return world

    def synchronized(self) -> None:
        """Notes that this rank has received the commit from which the world starts."""
        self._set_commit(self._world.start.number)

    def committed(self) -> None:
        """Notes that this rank has made the next commit."""
        self._set_commit(self.state.commit.number + 1)

    def forget(self) -> None:
        """Notes that this rank has no complete commit in memory."""
        self.state = self.state._replace(commit=NOTHING)

    def _set_commit(self, number: int) -> None:
        self.state = self.state._replace(commit=Commit(self._world.number, number))

    @property
    def broken(self) -> bool:
        """True if calls in the present world will fail."""
        return not self.state.away and 0 < self.state.world <= self._view.broken

    @property
    def meets(self) -> bool:
        """True if all ranks of this world must meet in the next one after this commit."""
        return self._view.meet == self.state.world > 0

    @property
    def leaves(self) -> bool:
        """True if the job must end at this commit."""
        return self._view.leave

    @property
    def ends(self) -> bool:
        """True if this rank is waiting and must end now because the job leaves. A rank that was in
        a world before ends only if there will be no next world. A rank that was never in a world
        has no commit to write, so it ends in any case."""
        new = self.state.world == 0
        return self.leaves and self.state.away and (new or self.lost)

    @property
    def lost(self) -> bool:
        """True if the supervisor does not answer this host's agent."""
        return self._view.lost
