# SPDX-License-Identifier: Apache-2.0
"""The processes of an elastic job: what agents have told of them, and which they shall run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from farandole.membership.words import JOINS, End, Rank, Status

_NEVER = 1 << 62  # the number of a Status that no agent sends


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
    cut: bool = False  # its connection has ended, and nothing came since
    going: bool = False  # its host is taken away

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.end is None]


def _lose_ranks(agent: _Agent, text: str) -> Iterator[News]:
    for rank in agent.alive():
        agent.ranks[rank.name] = rank._replace(end=End.LOST, text=text)
        yield News(agent.host, rank, agent.ranks[rank.name])


class Crew:
    """For the Decider."""

    def __init__(self, silence: float, cooldown: tuple[float, float]) -> None:
        """`silence`: seconds after which an agent's processes are not near any more. `cooldown`:
        seconds that a host rests after its first failure, and the longest."""
        self._silence, self._cooldown = silence, cooldown
        self._agents: dict[str, _Agent] = {}
        self._failures: dict[str, int] = {}  # of hosts
        self._resting: dict[str, float] = {}  # hosts that get no new process until then
        self._slots: Mapping[str, int] | None = None  # of hosts; None: as the agents say
        self._names = 0

    def hear(self, status: Status, now: float) -> Iterator[News]:
        """Takes what an agent says."""
        if status.agent not in self._agents:
            yield from self._lose_with_agents_of(status.host)
        agent = self._agents.setdefault(status.agent, _Agent(status.host, status.slots, now))
        if status.number <= agent.number:
            return
        agent.heard, agent.number, agent.cut = now, status.number, False
        agent.going = status.going
        agent.dropped &= {rank.name for rank in status.ranks}
        for rank in status.ranks:
            before = agent.ranks.get(rank.name, Rank(rank.name))
            if rank.name not in agent.dropped and before.end is None:
                agent.ranks[rank.name] = rank
                yield News(agent.host, before, rank)

    def _lose_with_agents_of(self, host: str) -> Iterator[News]:
        """A host has one agent at a time. The processes of earlier ones have ended with them."""
        for agent in self._agents.values():
            if agent.host == host and agent.number != _NEVER:
                agent.number, agent.going = _NEVER, False
                agent.dropped.clear()
                yield from _lose_ranks(agent, "was lost with the agent of its host")

    def cut_off(self, name: str) -> None:
        """The connection to this agent has ended."""
        if name in self._agents:
            self._agents[name].cut = True

    def heard(self, host: str) -> float:
        """When the agent of this host has said something; less than 0: never."""
        agents = [x for x in self._agents.values() if x.host == host and x.number != _NEVER]
        return max((agent.heard for agent in agents), default=-1.0)

    def is_near(self, host: str, now: float) -> bool:
        """Whether the agent of this host is connected, and not silent."""
        return any(x.host == host and self._is_near(x, now) for x in self._agents.values())

    def rest(self, host: str, now: float) -> float:
        """Lets this host have no new process for a time, twice as long after each failure; returns
        the seconds. 0: there is no other host, or it is taken away."""
        hosts = {host, *(agent.host for agent in self._agents.values())}
        if len(hosts) < 2 or any(x.going for x in self._agents.values() if x.host == host):
            return 0.0
        shortest, longest = self._cooldown
        times = self._failures[host] = self._failures.get(host, 0) + 1
        seconds = min(longest, shortest * 2.0 ** (times - 1))
        self._resting[host] = now + seconds
        return seconds

    def allow(self, slots: Mapping[str, int]) -> None:
        """From now on each host has so many slots, those that are not named none: their ranks train
        on until others can."""
        self._slots = slots

    def _slots_of(self, agent: _Agent) -> int:
        if agent.going:
            return 0
        return agent.slots if self._slots is None else self._slots.get(agent.host, 0)

    def forget(self, before: float) -> Iterator[News]:
        """Forgets agents that were not heard since then, which have ended their processes."""
        for name, agent in list(self._agents.items()):
            if agent.heard < before:
                del self._agents[name]
                yield from _lose_ranks(agent, "was lost: its host does not answer")

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
        return not agent.cut and agent.number != _NEVER and now <= agent.heard + self._silence

    def all_go(self) -> bool:
        """Whether all hosts are taken away."""
        agents = [agent for agent in self._agents.values() if agent.number != _NEVER]
        return bool(agents) and all(agent.going for agent in agents)

    def any_dropped(self) -> bool:
        """Whether a process may live that is not wanted."""
        return any(agent.dropped for agent in self._agents.values())

    # ---- who shall be there

    def wanted(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Each agent, the newest Status of it, and which processes it shall run."""
        for name, agent in self._agents.items():
            yield name, agent.number, tuple(rank.name for rank in agent.alive())

    def drop(self, names: Iterable[str]) -> list[tuple[str, Rank]]:
        """These shall be ended; returns them with their hosts."""
        ending, found = set(names), []
        for agent in self._agents.values():
            for name in sorted(ending & agent.ranks.keys()):
                agent.dropped.add(name)
                found.append((agent.host, agent.ranks.pop(name)))
        return found

    def fill(self, most: int, now: float, join: bool) -> None:
        """Starts processes, where there is room, until so many are near. `join`: others have
        trained already."""
        missing = most - len(self.near(now))
        for agent in self._agents.values():
            if not self._is_near(agent, now) or now < self._resting.get(agent.host, now):
                continue
            for _ in range(min(missing, self._slots_of(agent) - len(agent.alive()))):
                self._names += 1
                name = f"{self._names}{JOINS * join}"
                agent.ranks[name] = Rank(name)
                missing -= 1

    def unwanted(self, members: Container[str]) -> set[str]:
        """Names of processes for which their hosts have no slot any more, members last."""
        found = set()
        for agent in self._agents.values():
            alive = sorted(agent.alive(), key=lambda rank: rank.name not in members)
            found |= {rank.name for rank in alive[self._slots_of(agent) :]}
        return found

    def surplus(self, most: int, members: Container[str], now: float) -> list[str]:
        """Names of those that are near beyond `most`, and no members."""
        near = self.near(now)
        others = [rank.name for rank in near if rank.name not in members]
        return others[: max(0, len(near) - most)]
