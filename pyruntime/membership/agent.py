# SPDX-License-Identifier: Apache-2.0
"""The agent of one host of an elastic job: which processes it starts and ends."""

from __future__ import annotations

from typing import NamedTuple

from farandole.membership.words import End, Rank, Standing, Status, View, Wanted


class Start(NamedTuple):
    """An action: start the process of that name."""

    name: str


class Kill(NamedTuple):
    """An action: end it, stopped or not. Agent.ended() follows when it is gone."""

    name: str


class Tell(NamedTuple):
    """An action: send this to the rank of that name."""

    name: str
    view: View


Action = Start | Kill | Tell


class Agent:
    """Obeys the supervisor as long as it answers. A supervisor that has not answered for `lease`
    seconds has ended, or takes this host for lost and replaces its ranks. The old ranks must not
    run at the same time as the new ones. So the agent asks its ranks to leave after half of that
    time, and then kills them. When its host is taken away it starts no more processes."""

    def __init__(self, name: str, host: str, slots: int, lease: float, now: float) -> None:
        self._name, self._host, self._slots, self._lease = name, host, slots, lease
        self._ranks: dict[str, Rank] = {}
        self._told: dict[str, int] = {}  # of each that has ended: the first Status that says so
        self._newest = 0  # the number of the newest Wanted
        self._view = View()
        self._number = 0
        self._sent: dict[int, float] = {}  # when, of each Status since the last that was heard
        self._since = now  # when the newest Status was sent that the supervisor has heard
        self._until: float | None = None  # then this host is taken away; None: it stays

    def set_lease(self, seconds: float) -> None:
        """The supervisor's number."""
        self._lease = seconds

    def status(self, now: float) -> Status:
        """What to send: after each change, and at every beat."""
        self._number += 1
        self._sent[self._number] = now
        ranks = tuple(self._ranks.values())
        return Status(self._name, self._number, self._host, self._slots, ranks, self.going)

    def go(self, until: float) -> None:
        """Notes that this host is taken away; who has not left then is ended."""
        self._until = until

    def hear(self, wanted: Wanted) -> list[Action]:
        """Takes the supervisor's word."""
        if wanted.number <= self._newest:
            return []
        self._newest, self._view = wanted.number, wanted.view
        self._since = max(self._since, self._sent.get(wanted.heard, self._since))
        self._sent = {n: at for n, at in self._sent.items() if n > wanted.heard}
        actions: list[Action] = []
        for name, rank in list(self._ranks.items()):
            if name in wanted.ranks:
                if rank.end is None:
                    actions.append(Tell(name, self._view))
            elif rank.end is None:
                actions.append(Kill(name))
            elif self._told[name] <= wanted.heard:
                del self._ranks[name], self._told[name]  # the supervisor knows
        for name in wanted.ranks:
            if name not in self._ranks:
                self._ranks[name] = Rank(name)
                if self.going:
                    self.ended(name, End.LEFT)
                else:
                    actions.append(Start(name))
        return actions

    def look(self, now: float) -> list[Action]:
        """What is to do at a beat."""
        alive = [name for name, rank in self._ranks.items() if rank.end is None]
        if self.alone(now) or (self._until is not None and now > self._until):
            return [Kill(name) for name in alive]
        if now - self._since <= self._lease / 2 or self._view.lost:
            return []
        self._view = self._view._replace(leave=True, lost=True)
        return [Tell(name, self._view) for name in alive]

    def alone(self, now: float) -> bool:
        """Whether the supervisor has not answered for too long."""
        return now - self._since > self._lease

    def said(self, name: str, standing: Standing) -> list[Action]:
        """Takes what a rank says; its first words are answered."""
        self._ranks[name] = self._ranks[name]._replace(standing=standing)
        return [Tell(name, self._view)]

    def ends(self, name: str, end: End | None) -> None:
        """Takes a rank's last words; None: its program is followed by another one."""
        self._ranks[name] = self._ranks[name]._replace(said=end)

    def ended(self, name: str, end: End, text: str = "", code: int = 0) -> None:
        """Notes that a process is gone."""
        self._ranks[name] = self._ranks[name]._replace(end=end, text=text, code=code)
        self._told[name] = self._number + 1

    def world_of(self, name: str) -> int:
        """The last world that the process of that name was in."""
        return self._ranks[name].standing.world

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the newest world's ranks, in their order."""
        return self._view.world.members

    @property
    def going(self) -> bool:
        """Whether this host is taken away."""
        return self._until is not None

    @property
    def gone(self) -> bool:
        """Whether it is, and the supervisor knows that all that ran here has ended."""
        return self.going and not self._ranks

    @property
    def orphaned(self) -> bool:
        """Whether its ranks have been asked to leave because the supervisor does not answer."""
        return self._view.lost

    @property
    def idle(self) -> bool:
        """Whether no process lives here."""
        return all(rank.end is not None for rank in self._ranks.values())
