# SPDX-License-Identifier: Apache-2.0
"""Decides which processes one host's agent starts and kills."""

from __future__ import annotations

from typing import NamedTuple

from farandole.membership.messages import AgentStatus, Assignment, End, View, Worker, WorkerState


class Start(NamedTuple):
    """An action that starts a process with this name."""

    name: str


class Kill(NamedTuple):
    """An action that kills this process. Call Agent.ended() once the process is gone."""

    name: str


class Tell(NamedTuple):
    """An action that sends this view to this process."""

    name: str
    view: View


Action = Start | Kill | Tell


class Agent:
    """Does what the supervisor asks, as long as the supervisor answers. After `lease` seconds
    without an answer, the supervisor may have started other ranks elsewhere, and old and new ranks
    must not run at the same time. Therefore the agent asks its ranks to leave after half of the
    lease and kills them at the end of the lease. This class is not thread-safe. Times are in
    seconds on the caller's clock.
    """

    def __init__(self, name: str, host: str, slots: int, lease: float, now: float) -> None:
        self._name, self._host, self._slots, self._lease = name, host, slots, lease
        self._workers: dict[str, Worker] = {}
        # Maps each ended process to the number of the first status that reports its end.
        self._first_report: dict[str, int] = {}
        self._last_number = 0  # number of the newest assignment
        self._view = View()
        self._number = 0  # number of the last status
        self._sent: dict[int, float] = {}  # when each unacknowledged status was sent
        self._since = now  # time at which the last acknowledged status was sent
        self._until: float | None = None  # time at which a preempted host's processes are killed

    def set_lease(self, seconds: float) -> None:
        """Sets the lease to a value that the supervisor has sent."""
        self._lease = seconds

    def status(self, now: float) -> AgentStatus:
        """Returns the message to send after each change and at every heartbeat."""
        self._number += 1
        self._sent[self._number] = now
        workers = tuple(self._workers.values())
        return AgentStatus(
            self._name, self._number, self._host, self._slots, workers, self.draining
        )

    def drain(self, until: float) -> None:
        """Notes that this host is being preempted. From now on, the agent starts no processes, and
        it kills all processes at `until`."""
        self._until = until

    def receive(self, assignment: Assignment) -> list[Action]:
        """Applies a message from the supervisor and returns the actions to take. Ignores a message
        that is older than the last one."""
        if assignment.number <= self._last_number:
            return []
        self._last_number, self._view = assignment.number, assignment.view
        self._since = max(self._since, self._sent.get(assignment.heard, self._since))
        self._sent = {n: at for n, at in self._sent.items() if n > assignment.heard}
        actions: list[Action] = []
        for name, worker in list(self._workers.items()):
            if name in assignment.workers:
                if worker.end is None:
                    actions.append(Tell(name, self._view))
            elif worker.end is None:
                actions.append(Kill(name))
            elif self._first_report[name] <= assignment.heard:
                del self._workers[name], self._first_report[name]
        for name in assignment.workers:
            if name not in self._workers:
                self._workers[name] = Worker(name)
                if self.draining:
                    self.ended(name, End.LEFT)
                else:
                    actions.append(Start(name))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Returns the actions that are due at a heartbeat."""
        alive = [name for name, worker in self._workers.items() if worker.end is None]
        if self.lease_expired(now) or (self._until is not None and now > self._until):
            return [Kill(name) for name in alive]
        if now - self._since <= self._lease / 2 or self._view.lost:
            return []
        self._view = self._view._replace(leave=True, lost=True)
        return [Tell(name, self._view) for name in alive]

    def lease_expired(self, now: float) -> bool:
        """True if the supervisor has not answered for the whole lease."""
        return now - self._since > self._lease

    def report(self, name: str, state: WorkerState) -> list[Action]:
        """Stores a process's state and answers with the present view. Ignores unknown processes,
        such as a child of a process that was forgotten."""
        if name not in self._workers:
            return []
        self._workers[name] = self._workers[name]._replace(state=state)
        return [Tell(name, self._view)]

    def announce(self, name: str, end: End | None) -> None:
        """Stores the end that a process has announced, or None once its next program has
        started."""
        self._workers[name] = self._workers[name]._replace(announced=end)

    def ended(self, name: str, end: End, text: str = "", code: int = 0) -> None:
        """Notes that a process has ended."""
        self._workers[name] = self._workers[name]._replace(end=end, text=text, code=code)
        self._first_report[name] = self._number + 1

    def world_of(self, name: str) -> int:
        """Returns the number of the last world that this process was in."""
        return self._workers[name].state.world

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the processes in the newest world, in rank order."""
        return self._view.world.members

    @property
    def draining(self) -> bool:
        """True if this host is being preempted."""
        return self._until is not None

    @property
    def drained(self) -> bool:
        """True if this host is being preempted and the supervisor knows that no process is left."""
        return self.draining and not self._workers

    @property
    def orphaned(self) -> bool:
        """True if the ranks have been asked to leave because the supervisor does not answer."""
        return self._view.lost

    @property
    def idle(self) -> bool:
        """True if no process is alive on this host."""
        return all(worker.end is not None for worker in self._workers.values())
