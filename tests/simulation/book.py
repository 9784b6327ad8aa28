# SPDX-License-Identifier: Apache-2.0
"""The decisions and commits of a simulated elastic job, which are checked, and the job's rules."""

from __future__ import annotations

from typing import Any

from farandole.membership.messages import NOTHING, Commit
from farandole.membership.next_world import Record
from farandole.membership.scheduler import NotReady, Policy

__all__ = ["RULES", "Book"]

RULES = Policy(
    least=1,
    most=4,
    silence=3.0,
    lease=12.0,
    late=8.0,
    stalled=0.5,
    patience=1e9,
    restarts=10**6,
    cooldown=(2.0, 8.0),
)


class Book:
    """What was ever decided and acknowledged; checks both."""

    def __init__(self, simulation: Any) -> None:
        """`simulation`: whose processes are asked what they have."""
        self.record = Record()
        self.disk, self.disk_count = NOTHING, 0
        self.starts: dict[int, Commit] = {}
        self.counts: dict[Commit, int] = {}
        self.acknowledged: dict[int, Commit] = {}  # the newest of each world
        self.unsaved: set[Commit] = set()  # last commits whose writer has raised NotSaved
        self._simulation = simulation

    def commit(self) -> Commit:
        """What the supervisor finds on the disk."""
        if self._simulation.random.random() < 0.3:
            raise NotReady("slow")
        return self.disk

    def start_again(self) -> None:
        """The command was given again: what is not on the disk is lost."""
        self.record, last = Record(), self.disk.world
        self.starts = {world: start for world, start in self.starts.items() if world <= last}
        self.counts = {each: count for each, count in self.counts.items() if each.world <= last}
        self.acknowledged = {x: each for x, each in self.acknowledged.items() if x <= last}

    def note(self, record: Record) -> None:
        before, self.record = self.record, record
        if record == before:
            return
        if before.done:  # all were lost before their programs had ended: they begin anew
            members = [self._simulation.processes[name] for name in before.world.members]
            assert not any(process.can_act() for process in members), "it was done"
        if record.done:
            assert record.world == before.world
            return
        number, start = record.world.number, record.world.start
        last = before.world.number or self.disk.world
        assert number == last + 1, "two worlds with one number"
        assert len(set(record.world.members)) == len(record.world.members) <= RULES.most
        self.starts[number] = start
        for commit in self.acknowledged.values():
            if not self.holds(start, commit):
                held = [p.name for p in self._simulation.alive() if self.holds(p.commit, commit)]
                assert not held, f"world {number} from {start} loses {commit}, which {held} have"
                assert not self.holds(self.disk, commit), f"{commit} on the disk is lost"

    def holds(self, commit: Commit, other: Commit) -> bool:
        """Whether a state of `commit` has that of `other` in its past."""
        while commit.world > other.world:
            commit = min(self.starts[commit.world], Commit(commit.world, 0))
        return commit.world == other.world and commit.number >= other.number

    def saved(self, commit: Commit, count: int) -> None:
        assert self.counts.setdefault(commit, count) == count, f"{commit} means two states"

    def acknowledge(self, commit: Commit) -> None:
        before = self.acknowledged.get(commit.world, commit)
        self.acknowledged[commit.world] = max(before, commit)
        if commit.world < self.record.world.number:
            assert self.holds(self.starts[commit.world + 1], commit), f"{commit} came too late"

    def put(self, commit: Commit, count: int) -> None:
        assert commit >= self.disk, f"{commit} replaces {self.disk} on the disk"
        assert self.counts[commit] == count, f"{commit} is written with another state"
        self.disk, self.disk_count = commit, count

    def leave(self, commit: Commit) -> None:
        """A rank ends after this commit, which was the last one of its world."""
        if commit not in self.unsaved:
            assert self.holds(self.disk, commit), f"the last {commit} is lost: disk {self.disk}"
