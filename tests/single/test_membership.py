# SPDX-License-Identifier: Apache-2.0
"""The decisions of an elastic job: simulated jobs, and single cases."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.elastic import Simulation

from farandole.membership.agent import Agent, Kill, Start
from farandole.membership.decider import Decider, Rules
from farandole.membership.journal import Journal, Record
from farandole.membership.words import Commit, End, Rank, Standing, Status, View, Wanted

RULES = Rules(least=1, most=3, late=5.0, stalled=0.5, gather=0.0)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_simulated_jobs(first: int) -> None:
    for seed in range(first, first + 50):
        Simulation(seed).run()


class Memory(Journal):
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


class Job:
    """A decider and one agent, whose ranks are as the test says."""

    def __init__(self, journal: Memory | None = None) -> None:
        self.journal = journal or Memory()
        self.decider = Decider(RULES, self.journal, 0.0)
        self.number, self.now = 0, 0.0
        self.ranks: dict[str, Rank] = {}
        self.tell()

    def tell(self, seconds: float = 0.0, **changes: Any) -> View:
        """The next Status, `seconds` later."""
        self.number += 1
        self.now += seconds
        self.decider.hear(Status("a", self.number, "a", 3, tuple(self.ranks.values())), self.now)
        self.wanted: Wanted = self.decider.step(self.now)["a"]
        for name in self.wanted.ranks:
            self.ranks.setdefault(name, Rank(name))
        return self.wanted.view

    def stand(self, name: str, world: int, number: int, **changes: bool) -> None:
        self.ranks[name] = Rank(name, Standing(world, commit=Commit(world, number), **changes))

    def begin(self) -> list[str]:
        """All are in world 1 with commits 4, 5 and 4."""
        for name in self.ranks:
            self.ranks[name] = Rank(name, Standing(away=True))
        members = self.tell().world.members
        for name, number in zip(members, (4, 5, 4), strict=True):
            self.stand(name, 1, number)
        assert self.tell().over == 0
        return list(members)


def test_survivors_go_on_from_the_newest_commit() -> None:
    job = Job()
    first, second, third = job.begin()
    job.ranks[first] = job.ranks[first]._replace(end=End.LOST, text="killed by signal 9")
    view = job.tell()
    assert (view.world.number, view.over, view.broken) == (1, 1, 1)
    job.stand(second, 1, 5, away=True)
    assert job.tell().world.number == 1, "one is still on its way"
    job.stand(third, 1, 4, away=True)
    world = job.tell().world
    assert (world.number, world.members, world.start) == (2, (second, third), Commit(1, 5))
    assert len(job.wanted.ranks) == 3, "a new process replaces the dead one"
    assert "rank 0 on a was lost: killed by signal 9" in job.decider.story


@pytest.mark.parametrize(("stalled", "seconds"), [(True, 0.5), (False, 5.0)])
def test_who_hangs_is_ended(stalled: bool, seconds: float) -> None:
    job = Job()
    first, second, third = job.begin()
    job.stand(first, 1, 5, away=True, stalled=stalled)
    job.stand(second, 1, 5, away=True, stalled=stalled)
    job.tell()
    assert third in job.wanted.ranks
    job.tell(0.9 * seconds)
    assert third in job.wanted.ranks
    world = job.tell(0.2 * seconds).world
    assert third not in job.wanted.ranks
    assert world.members == (first, second)


def test_who_hangs_while_it_waits_is_ended() -> None:
    """Its agent goes on to hear of worlds, but it enters none."""
    job = Job()
    first, second, third = job.begin()
    job.ranks[first] = job.ranks[first]._replace(end=End.LOST)
    job.stand(second, 1, 5, away=True)
    job.stand(third, 1, 4, away=True)
    assert job.tell().world.members == (second, third)
    job.ranks[second] = Rank(second, Standing(2, True, 1, Commit(1, 5), stalled=True))
    job.ranks[third] = Rank(third, Standing(1, True, 2, Commit(1, 4)))
    job.tell()
    assert third not in job.wanted.ranks
    assert second in job.wanted.ranks


def test_a_new_process_is_taken_in_when_the_others_meet() -> None:
    job = Job()
    first, second, third = job.begin()
    job.ranks[third] = job.ranks[third]._replace(end=End.LOST)
    for name in (first, second):
        job.stand(name, 1, 5, away=True)
    view = job.tell()
    new = next(name for name in job.wanted.ranks if name not in (first, second, third))
    for name in (first, second):
        job.stand(name, 2, 5)
    job.ranks[new] = Rank(new, Standing(away=True, over=view.over))
    assert job.tell().meet == 2
    for name in (first, second):
        job.stand(name, 2, 6, away=True, met=True)
    view = job.tell()
    assert (view.world.number, view.over) == (2, 2), "the new one must promise to stay out of it"
    job.ranks[new] = Rank(new, Standing(away=True, over=view.over))
    view = job.tell()
    assert view.world.members == (first, second, new)
    assert view.broken == 2 < view.world.number == 3


def test_training_is_done_when_all_say_so() -> None:
    job = Job()
    members = job.begin()
    for name in members[:2]:
        job.stand(name, 1, 9, away=True, finished=True)
    view = job.tell()
    assert (view.done, view.broken) == (False, 0), "the third makes its last calls undisturbed"
    job.stand(members[2], 1, 9, away=True, finished=True)
    assert job.tell().done
    for name in members:
        job.ranks[name] = job.ranks[name]._replace(end=End.WELL)
    job.tell()
    assert job.decider.outcome == ""


def test_who_is_done_goes_on_in_no_world_when_asked_to_leave() -> None:
    job = Job()
    for name in job.begin():
        job.stand(name, 1, 9, away=True, finished=True)
    assert job.tell().done
    job.decider.leave()
    first = next(iter(job.ranks))
    job.ranks[first] = job.ranks[first]._replace(end=End.LOST)
    view = job.tell()
    assert view.done
    assert view.world.number == 1


def test_a_new_supervisor_takes_the_ranks_over() -> None:
    job = Job()
    members = job.begin()
    new = Decider(RULES, job.journal, job.now)
    new.hear(Status("a", 100, "a", 3, tuple(job.ranks.values())), job.now)
    wanted = new.step(job.now)["a"]
    assert set(wanted.ranks) == set(members)
    assert (wanted.view.world.number, wanted.view.over) == (1, 0)
    assert job.decider.step(job.now) == {}
    assert job.decider.outcome is not None


def test_the_programs_own_failure_ends_the_job() -> None:
    job = Job()
    first = job.begin()[0]
    job.ranks[first] = job.ranks[first]._replace(end=End.FAILED, text="ValueError: no")
    job.tell()
    assert job.wanted.ranks == ()
    for name, rank in job.ranks.items():
        job.ranks[name] = rank._replace(end=rank.end or End.LOST)
    job.tell()
    assert job.decider.outcome == f"{first} failed: ValueError: no"


def wanted(term: int, number: int, heard: int, *ranks: str) -> Wanted:
    return Wanted(term, number, heard, ranks, View())


def test_an_agent_obeys_the_latest_supervisor() -> None:
    agent = Agent("a", "a", 3, 10.0, 0.0)
    assert agent.hear(wanted(1, 5, 0, "x")) == [Start("x")]
    assert agent.hear(wanted(1, 5, 0)) == []
    assert agent.hear(wanted(2, 1, 0)) == [Kill("x")]
    assert agent.hear(wanted(1, 6, 0, "y")) == []
    agent.ended("x", End.LOST)
    assert agent.hear(wanted(2, 2, 0)) == []
    assert agent.status(1.0).ranks == ()


def test_an_agent_that_nobody_hears_ends_its_ranks() -> None:
    agent = Agent("a", "a", 3, 10.0, 0.0)
    first = agent.status(3.0).number
    agent.hear(wanted(1, 1, first, "x"))
    assert agent.look(12.9) == []
    for number in range(2, 9):  # it hears, but is not heard
        agent.status(3.0 + number)
        agent.hear(wanted(1, number, first, "x"))
    assert agent.look(13.1) == [Kill("x")]
