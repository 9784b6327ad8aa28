# SPDX-License-Identifier: Apache-2.0
"""A rank of an elastic job: which world it is in, and which commit it has."""

from __future__ import annotations

from farandole.membership.words import NOTHING, Commit, Standing, View, World


class Member:
    """Its rank tells it what it does, and its agent's words; it says what follows."""

    def __init__(self, name: str, over: int = 0) -> None:
        """`over`: it enters no world up to this number, where a program before it was."""
        self.name = name
        self.standing = Standing(over=over)  # for the agent, whenever it changes
        self._view = View()
        self._world = World()

    def hear(self, view: View) -> None:
        """Takes what the agent has sent; its words come in order."""
        self._view = view
        over = max(self.standing.over, view.over)
        self.standing = self.standing._replace(over=over)

    def wait(self, finished: bool = False, met: bool = False, stalled: bool = False) -> None:
        """Leaves the present world, if there is one, for the next. Without a reason: by a failure,
        so that the others' calls will fail too."""
        call = self._view.done + 1 if finished else 0
        self.standing = self.standing._replace(away=True, finished=call, met=met, stalled=stalled)

    def stay(self) -> bool:
        """Goes on in the present world, if the call that this rank has finished has ended on all
        ranks; returns whether it has."""
        done = 0 < self.standing.finished <= self._view.done
        if done:
            self.standing = self.standing._replace(away=False, finished=0)
        return done

    def is_awaited(self) -> bool:
        """Whether it waits, and the next world is decided and has it as a member."""
        world = self._view.world
        decided = world.number > max(self.standing.world, self.standing.over)
        return self.standing.away and decided and self.name in world.members

    def enter(self) -> World | None:
        """The next world; from now on this rank is in it. None: it is not decided."""
        if not self.is_awaited():
            return None
        world = self._view.world
        self._world = world
        before = self.standing
        self.standing = Standing(world.number, False, before.over, before.commit)
        return world

    def synchronized(self) -> None:
        """This rank has the whole state from which the world starts."""
        self._set_commit(self._world.start.number)

    def committed(self) -> None:
        """This rank has saved the next commit."""
        self._set_commit(self.standing.commit.number + 1)

    def forget(self) -> None:
        """This rank's memory has no whole state any more."""
        self.standing = self.standing._replace(commit=NOTHING)

    def _set_commit(self, number: int) -> None:
        self.standing = self.standing._replace(commit=Commit(self._world.number, number))

    @property
    def broken(self) -> bool:
        """Whether the calls of the present world will fail."""
        return not self.standing.away and 0 < self.standing.world <= self._view.broken

    @property
    def meets(self) -> bool:
        """Whether this rank asks all to leave the world after the commit under way."""
        return self._view.meet == self.standing.world > 0

    @property
    def leaves(self) -> bool:
        """Whether the job shall end at the commit under way."""
        return self._view.leave

    @property
    def ends(self) -> bool:
        """Whether this rank, which waits, shall end now: it was in no world, and has no commit that
        must go to the disk first; or no world will be decided any more."""
        in_none = self.standing.world == 0
        return self.leaves and self.standing.away and (in_none or self.lost)

    @property
    def lost(self) -> bool:
        """Whether the supervisor does not answer this host's agent."""
        return self._view.lost
