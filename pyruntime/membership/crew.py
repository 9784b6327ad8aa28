# SPDX-License-Identifier: Apache-2.0
"""The processes of an elastic job: what agents have told of them, and which they shall run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from farandole.membership.words import Rank, Status


class News(NamedTuple):
    """What has changed of a process."""

    host: str
    before: Rank
    now: Rank


@dataclass
class _Agent:
    """What is known of one agent."""

    host: str
    slots: int
    heard: float  # when
    number: int = 0  # of its newest Status
    ranks: dict[str, Rank] = field(default_factory=dict)  # which it shall run, or that have ended
    dropped: set[str] = field(default_factory=set)  # which it shall end, and that may live
    resting: float = 0.0  # until then it gets no new process
    cut: bool = False  # its connection has ended, and nothing came since

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.end is None]


class Crew:
    """For the Decider."""

    def __init__(self, term: int, silence: float) -> None:
        """`silence`: seconds after which an agent's processes are not near any more."""
        self._term, self._silence = term, silence
        self._agents: dict[str, _Agent] = {}
        self._names = 0

    def hear(self, status: Status, now: float) -> Iterator[News]:
        """Takes what an agent says."""
        agent = self._agents.setdefault(status.agent, _Agent(status.host, status.slots, now))
        if status.number <= agent.number:
            return
        agent.heard, agent.number, agent.cut = now, status.number, False
        agent.dropped &= {rank.name for rank in status.ranks}
        for rank in status.ranks:
            # One that is new here was an earlier supervisor's.
            before = agent.ranks.get(rank.name, Rank(rank.name))
            if rank.name not in agent.dropped and before.end is None:
                agent.ranks[rank.name] = rank
                yield News(agent.host, before, rank)

    def cut_off(self, name: str) -> None:
        """The connection to this agent has ended."""
        if name in self._agents:
            self._agents[name].cut = True

    def rest(self, host: str, until: float) -> None:
        """Lets this host have no new process for a time, if there are others."""
        for agent in self._agents.values():
            if agent.host == host:
                agent.resting = until

    def forget(self, before: float) -> Iterator[tuple[str, Rank]]:
        """Forgets agents that were not heard since then; their living processes, with hosts."""
        for name, agent in list(self._agents.items()):
            if agent.heard < before:
                del self._agents[name]
                yield from ((agent.host, rank) for rank in agent.alive())

    # ---- who is there

    def all(self) -> list[Rank]:
        """All processes that are known, those that have ended too."""
        return [rank for agent in self._agents.values() for rank in agent.ranks.values()]

    def alive(self) -> list[Rank]:
        """Those that may live, and that are wanted."""
        return [rank for rank in self.all() if rank.end is None]

    def near(self, now: float) -> list[Rank]:
        """Those of them whose agents are not silent."""
        near = [agent for agent in self._agents.values() if self._is_near(agent, now)]
        return [rank for agent in near for rank in agent.alive()]

    def _is_near(self, agent: _Agent, now: float) -> bool:
        return not agent.cut and now <= agent.heard + self._silence

    def any_dropped(self) -> bool:
        """Whether a process may live that is not wanted."""
        return any(agent.dropped for agent in self._agents.values())

    # ---- who shall be there

    def wanted(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Each agent, the newest Status of it, and which processes it shall run."""
        for name, agent in self._agents.items():
            yield name, agent.number, tuple(rank.name for rank in agent.alive())

    def drop(self, names: Iterable[str]) -> Iterator[tuple[str, Rank]]:
        """These shall be ended; returns them with their hosts."""
        for agent in self._agents.values():
            for name in set(names) & agent.ranks.keys():
                agent.dropped.add(name)
                yield agent.host, agent.ranks.pop(name)

    def fill(self, most: int, now: float) -> None:
        """Starts processes, where there is room, until so many are near."""
        missing = most - len(self.near(now))
        hosts = {agent.host for agent in self._agents.values()}
        for agent in self._agents.values():
            if not self._is_near(agent, now) or (now < agent.resting and len(hosts) > 1):
                continue
            for _ in range(min(missing, agent.slots - len(agent.alive()))):
                self._names += 1
                name = f"{self._term}.{self._names}"
                agent.ranks[name] = Rank(name)
                missing -= 1

    def surplus(self, most: int, members: Container[str], now: float) -> list[str]:
        """Names of those that are near beyond `most`, and no members."""
        near = self.near(now)
        others = [rank.name for rank in near if rank.name not in members]
        return others[: max(0, len(near) - most)]
