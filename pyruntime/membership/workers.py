# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of an elastic job: their states as reported by agents, and which must run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from farandole.membership.messages import JOINS, AgentStatus, End, Worker

_NEVER = 1 << 62  # marks an agent that has been replaced by another one


class Change(NamedTuple):
    """One process before and after an agent's report."""

    host: str
    before: Worker
    now: Worker


@dataclass
class _AgentRecord:
    """One agent's last report, and the processes that the agent must run."""

    host: str
    slots: int
    heard: float  # time of the newest report
    number: int = 0  # number of the newest AgentStatus
    workers: dict[str, Worker] = field(default_factory=dict)  # those that must run or have ended
    # Names of processes that must be killed and may still be alive.
    stopping: set[str] = field(default_factory=set)
    disconnected: bool = False  # True if no report has come since the agent's connection ended
    draining: bool = False  # True if the agent's host is being preempted

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.end is None]


def _lose_workers(agent: _AgentRecord, text: str) -> Iterator[Change]:
    for worker in agent.alive():
        agent.workers[worker.name] = worker._replace(end=End.LOST, text=text)
        yield Change(agent.host, worker, agent.workers[worker.name])


class Workers:
    """All processes of one job. Only Scheduler uses this class. Times are in seconds on the
    caller's clock."""

    def __init__(self, silence: float, cooldown: tuple[float, float]) -> None:
        """`silence` is the number of seconds without a report after which an agent is unreachable.
        `cooldown` holds the number of seconds during which a host gets no new processes after its
        first failure, and the longest such time."""
        self._silence, self._cooldown = silence, cooldown
        self._agents: dict[str, _AgentRecord] = {}
        self._failures: dict[str, int] = {}  # number of failures, by host
        self._cooling: dict[str, float] = {}  # when each host may get new processes
        self._slots: Mapping[str, int] | None = None  # by host; None means as agents report
        self._names = 0

    def receive(self, status: AgentStatus, now: float) -> Iterator[Change]:
        """Applies an agent's report. Ignores a report that is older than the last one."""
        if status.agent not in self._agents:
            yield from self._lose_with_agents_of(status.host)
        agent = self._agents.setdefault(status.agent, _AgentRecord(status.host, status.slots, now))
        if status.number <= agent.number:
            return
        agent.heard, agent.number, agent.disconnected = now, status.number, False
        agent.draining = status.draining
        agent.stopping &= {worker.name for worker in status.workers}
        for worker in status.workers:
            before = agent.workers.get(worker.name, Worker(worker.name))
            if worker.name not in agent.stopping and before.end is None:
                agent.workers[worker.name] = worker
                yield Change(agent.host, before, worker)

    def _lose_with_agents_of(self, host: str) -> Iterator[Change]:
        """Marks processes of this host's earlier agents as lost, because a new agent kills them."""
        for agent in self._agents.values():
            if agent.host == host and agent.number != _NEVER:
                agent.number, agent.draining = _NEVER, False
                agent.stopping.clear()
                yield from _lose_workers(agent, "was lost with the agent of its host")

    def disconnect(self, name: str) -> None:
        """Notes that the connection to this agent has ended."""
        if name in self._agents:
            self._agents[name].disconnected = True

    def last_heard(self, host: str) -> float:
        """Returns the time of the last report from this host's agent, or -1 if there was none."""
        agents = [x for x in self._agents.values() if x.host == host and x.number != _NEVER]
        return max((agent.heard for agent in agents), default=-1.0)

    def is_reachable(self, host: str, now: float) -> bool:
        """True if this host's agent is connected and has reported in the last `silence` seconds."""
        return any(x.host == host and self._is_reachable(x, now) for x in self._agents.values())

    def cool_down(self, host: str, now: float) -> float:
        """Prevents new processes on this host for a time that doubles with each failure. Returns
        that time in seconds. It is 0 if this is the only host or is being preempted."""
        hosts = {host, *(agent.host for agent in self._agents.values())}
        if len(hosts) < 2 or any(x.draining for x in self._agents.values() if x.host == host):
            return 0.0
        shortest, longest = self._cooldown
        times = self._failures[host] = self._failures.get(host, 0) + 1
        seconds = min(longest, shortest * 2.0 ** (times - 1))
        self._cooling[host] = now + seconds
        return seconds

    def set_slots(self, slots: Mapping[str, int]) -> None:
        """Sets each host's number of slots. A host that is not named has none. Members that lose
        their slots continue to train until the other members can do without them."""
        self._slots = slots

    def _slots_of(self, agent: _AgentRecord) -> int:
        if agent.draining:
            return 0
        return agent.slots if self._slots is None else self._slots.get(agent.host, 0)

    def forget_silent(self, before: float) -> Iterator[Change]:
        """Removes agents that have not reported since `before`. Their processes have also ended."""
        for name, agent in list(self._agents.items()):
            if agent.heard < before:
                del self._agents[name]
                yield from _lose_workers(agent, "was lost: its host does not answer")

    # ---- known processes

    def all(self) -> list[Worker]:
        """Returns all known processes, including those that have ended."""
        return [worker for agent in self._agents.values() for worker in agent.workers.values()]

    def alive(self) -> list[Worker]:
        """Returns the processes that must run and may be alive."""
        return [worker for worker in self.all() if worker.end is None]

    def reachable(self, now: float) -> list[Worker]:
        """Returns the living processes of reachable agents."""
        near = [agent for agent in self._agents.values() if self._is_reachable(agent, now)]
        return [worker for agent in near for worker in agent.alive()]

    def _is_reachable(self, agent: _AgentRecord, now: float) -> bool:
        replaced = agent.number == _NEVER
        return not (agent.disconnected or replaced) and now <= agent.heard + self._silence

    def all_draining(self) -> bool:
        """Returns True if every host is being preempted."""
        agents = [agent for agent in self._agents.values() if agent.number != _NEVER]
        return bool(agents) and all(agent.draining for agent in agents)

    def any_stopping(self) -> bool:
        """Returns True if a process that must be killed may still be alive."""
        return any(agent.stopping for agent in self._agents.values())

    # ---- wanted processes

    def wanted(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Yields for each agent its name, the number of its last report, and the names of the
        processes that it must run."""
        for name, agent in self._agents.items():
            yield name, agent.number, tuple(worker.name for worker in agent.alive())

    def stop(self, names: Iterable[str]) -> list[tuple[str, Worker]]:
        """Makes agents kill these processes. Returns a pair (host, process) for each."""
        ending, found = set(names), []
        for agent in self._agents.values():
            for name in sorted(ending & agent.workers.keys()):
                agent.stopping.add(name)
                found.append((agent.host, agent.workers.pop(name)))
        return found

    def start_missing(self, most: int, now: float, join: bool) -> None:
        """Starts processes on free slots until `most` are reachable. `join` is True if other
        processes are already training; the new ones then join them later."""
        missing = most - len(self.reachable(now))
        for agent in self._agents.values():
            if not self._is_reachable(agent, now) or now < self._cooling.get(agent.host, now):
                continue
            for _ in range(min(missing, self._slots_of(agent) - len(agent.alive()))):
                self._names += 1
                name = f"{self._names}{JOINS * join}"
                agent.workers[name] = Worker(name)
                missing -= 1

    def unwanted(self, members: Container[str]) -> set[str]:
        """Returns the names of processes whose hosts have no slot for them. Members get slots
        first."""
        found = set()
        for agent in self._agents.values():
            alive = sorted(agent.alive(), key=lambda worker: worker.name not in members)
            found |= {worker.name for worker in alive[self._slots_of(agent) :]}
        return found

    def surplus(self, most: int, members: Container[str], now: float) -> list[str]:
        """Returns the names of reachable processes that exceed `most`, but never those of
        members."""
        near = self.reachable(now)
        others = [worker.name for worker in near if worker.name not in members]
        return others[: max(0, len(near) - most)]
