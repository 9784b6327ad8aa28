# SPDX-License-Identifier: Apache-2.0
"""The journal of a simulated elastic job, which checks what is written, and the job's rules."""

from __future__ import annotations

from typing import Any

from farandole.membership.decider import Rules
from farandole.membership.journal import Journal, Record, Unready
from farandole.membership.words import NOTHING, Commit

__all__ = ["RULES", "Book"]

RULES = Rules(
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


class Memory(Journal):
    """A journal that no process outlives."""

    def __init__(self) -> None:
        self.record, self.newest = Record(), 0

    def take(self) -> Record:
        self.newest += 1
        self.record = self.record._replace(term=self.newest)
        return self.record

    def term(self) -> int:
        return self.newest

    def write(self, record: Record) -> bool:
        if record.term == self.newest:
            self.record = record
        return record.term == self.newest


class Book(Memory):
    """The journal, and what was ever written and acknowledged; checks both."""

    def __init__(self, simulation: Any) -> None:
        """`simulation`: whose processes are asked what they have."""
        super().__init__()
        self.disk, self.disk_count = NOTHING, 0
        self.starts: dict[int, Commit] = {}
        self.counts: dict[Commit, int] = {}
        self.acknowledged: dict[int, Commit] = {}  # the newest of each world
        self._simulation = simulation
        self._unheard: Record | None = None  # on the disk, unless another one is written

    def take(self) -> Record:
        unheard, self._unheard = self._unheard, None
        if unheard is not None:  # the one before had asked for it, and has not lived to hear of it
            self._put(unheard)
        return super().take()

    def commit(self) -> Commit:
        if self._simulation.random.random() < 0.3:
            raise Unready("slow")
        return self.disk

    def write(self, record: Record) -> bool:
        """As on a slow disk: what has not been answered may be there, or be overwritten."""
        if record.term != self.newest:
            return False
        if self._simulation.random.random() < 0.4:
            self._unheard = self._simulation.random.choice([record, None])
            raise Unready("slow")
        self._unheard = None
        return self._put(record)

    def _put(self, record: Record) -> bool:
        before, self.record = self.record, record
        if record.ended:
            assert record.world == before.world
            return True
        if before.done:  # all were lost before their programs had ended: they begin anew
            members = [self._simulation.processes[name] for name in before.world.members]
            assert not any(process.can_act() for process in members), "it was done"
        if record.done:
            assert record.world == before.world
            return True
        number, start = record.world.number, record.world.start
        assert number == before.world.number + 1, "two worlds with one number"
        assert len(set(record.world.members)) == len(record.world.members) <= RULES.most
        self.starts[number] = start
        for commit in self.acknowledged.values():
            if not self.holds(start, commit):
                held = [p.name for p in self._simulation.alive() if self.holds(p.commit, commit)]
                assert not held, f"world {number} from {start} loses {commit}, which {held} have"
                assert not self.holds(self.disk, commit), f"{commit} on the disk is lost"
        return True

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
        if commit > self.disk:
            self.disk, self.disk_count = commit, count
