# SPDX-License-Identifier: Apache-2.0
"""The decisions of an elastic job: simulated jobs, and single cases."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from simulation.elastic import Simulation

from farandole.membership.agent import Agent, Kill, Start, Tell
from farandole.membership.member import Member
from farandole.membership.messages import (
    NOTHING,
    AgentStatus,
    Assignment,
    Commit,
    End,
    View,
    Worker,
    WorkerState,
    World,
)
from farandole.membership.next_world import Record, choose
from farandole.membership.scheduler import Policy, Scheduler
from harness.seed import SEED

RULES = Policy(least=1, most=3, late=5.0, stalled=0.5, gather=0.0)


SEEDS = 300 if os.environ.get("CI") else 100


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_simulated_jobs(first: int) -> None:
    for seed in range(SEED + first, SEED + first + 50):
        try:
            Simulation(seed).run()
        except Exception as reason:
            pytest.fail(f"{reason!r}; again: make simulate-elastic SEED={seed} SEEDS=1")


class Job:
    """A scheduler and one agent, whose ranks are as the test says."""

    def __init__(self, rules: Policy = RULES, disk: Commit = NOTHING) -> None:
        self.scheduler = Scheduler(rules, lambda: disk, 0.0)
        self.number, self.now = 0, 0.0
        self.ranks: dict[str, Worker] = {}
        self.tell()

    def tell(self, seconds: float = 0.0, going: bool = False) -> View:
        """The next AgentStatus, `seconds` later."""
        self.number += 1
        self.now += seconds
        status = AgentStatus("a", self.number, "a", 3, tuple(self.ranks.values()), going)
        self.scheduler.receive(status, self.now)
        self.wanted: Assignment = self.scheduler.step(self.now)["a"]
        for name in self.wanted.workers:
            self.ranks.setdefault(name, Worker(name))
        return self.wanted.view

    def end(self, name: str, how: End, **changes: Any) -> None:
        self.ranks[name] = self.ranks[name]._replace(end=how, **changes)

    def stand(self, name: str, world: int, number: int, **changes: bool) -> None:
        self.ranks[name] = Worker(name, WorkerState(world, commit=Commit(world, number), **changes))

    def begin(self) -> list[str]:
        """All are in world 1 with commits 4, 5 and 4."""
        for name in self.ranks:
            self.ranks[name] = Worker(name, WorkerState(away=True))
        members = self.tell().world.members
        for name, number in zip(members, (4, 5, 4), strict=True):
            self.stand(name, 1, number)
        assert self.tell().over == 0
        return list(members)


def test_survivors_go_on_from_the_newest_commit() -> None:
    job = Job()
    first, second, third = job.begin()
    job.ranks[first] = job.ranks[first]._replace(end=End.LOST, text="was killed by SIGKILL")
    view = job.tell()
    assert (view.world.number, view.over, view.broken) == (1, 1, 1)
    job.stand(second, 1, 5, away=True)
    assert job.tell().world.number == 1, "one is still on its way"
    job.stand(third, 1, 4, away=True)
    world = job.tell().world
    assert (world.number, world.members, world.start) == (2, (second, third), Commit(1, 5))
    assert len(job.wanted.workers) == 3, "a new process replaces the dead one"
    assert "rank 0 on a was killed by SIGKILL" in job.scheduler.log


@pytest.mark.parametrize(("stalled", "seconds"), [(True, 0.5), (False, 5.0)])
def test_who_hangs_is_ended(stalled: bool, seconds: float) -> None:
    job = Job()
    first, second, third = job.begin()
    job.stand(first, 1, 5, away=True, stalled=stalled)
    job.stand(second, 1, 5, away=True, stalled=stalled)
    job.tell()
    assert third in job.wanted.workers
    job.tell(0.9 * seconds)
    assert third in job.wanted.workers
    world = job.tell(0.2 * seconds).world
    assert third not in job.wanted.workers
    assert world.members == (first, second)


def test_who_does_not_come_to_the_first_world_is_ended() -> None:
    job = Job()
    first, second, hangs = list(job.ranks)
    for name in (first, second):
        job.ranks[name] = Worker(name, WorkerState(away=True))
    job.tell()
    job.tell(4.0)
    assert hangs in job.wanted.workers
    job.ranks[second] = Worker(second, WorkerState(), End.LOST)
    job.tell(0.5)
    (new,) = set(job.wanted.workers) - {first, second, hangs}
    job.tell(1.0)
    assert hangs not in job.wanted.workers
    assert new in job.wanted.workers, "the new one has its own time"
    assert any("hangs: it is killed" in text for text in job.scheduler.log)


def test_all_that_a_death_leaves_hang_and_are_ended() -> None:
    """Nobody waits for them but a world that is over."""
    job = Job()
    first, second, third = job.begin()
    job.end(first, End.LOST, text="was killed by SIGKILL")
    job.tell()
    job.tell(4.9)
    assert {second, third} <= {*job.wanted.workers}
    job.tell(0.2)
    assert not {second, third} & {*job.wanted.workers}
    del job.ranks[second], job.ranks[third]
    job.tell()
    assert len([name for name in job.wanted.workers if name != first]) == 3, "others begin"


def test_who_works_after_training_is_not_ended() -> None:
    job = Job()
    members = job.begin()
    for name in members:
        job.stand(name, 1, 5, away=True)
        job.ranks[name] = Worker(name, job.ranks[name].state._replace(finished=1))
    assert job.tell().done == 1
    first, second, third = members
    for name in (second, third):
        job.stand(name, 1, 5)
    job.end(first, End.LOST, text="was killed by SIGKILL")
    job.tell()
    job.tell(100 * RULES.late)
    assert {second, third} <= {*job.wanted.workers}


def test_worlds_that_all_leave_by_agreement_are_no_failures() -> None:
    """shutdown() and init(), again and again, before the first commit."""
    job = Job(rules=replace(RULES, restarts=2))
    for world in range(20):
        for name in job.ranks:
            job.ranks[name] = Worker(name, WorkerState(world, away=True, met=True))
        assert job.tell().world.number == world + 1
    assert job.scheduler.outcome is None


def test_worlds_that_never_begin_end_the_job() -> None:
    """All live, and meet again and again: that is no progress."""
    job = Job(rules=replace(RULES, restarts=2))
    world = 0
    while job.wanted.workers:
        for name in job.ranks:
            job.ranks[name] = Worker(name, WorkerState(world, away=True))
        world += 1
        assert job.tell().world.number == min(world, 4)
    for name in job.ranks:
        job.end(name, End.LOST)
    job.tell()
    assert job.scheduler.outcome == "9 failures without a commit: giving up"


def test_a_new_process_is_taken_in_when_the_others_meet() -> None:
    job = Job()
    first, second, third = job.begin()
    job.ranks[third] = job.ranks[third]._replace(end=End.LOST)
    for name in (first, second):
        job.stand(name, 1, 5, away=True)
    view = job.tell()
    new = next(name for name in job.wanted.workers if name not in (first, second, third))
    for name in (first, second):
        job.stand(name, 2, 5)
    job.ranks[new] = Worker(new, WorkerState(away=True, over=view.over))
    assert job.tell().meet == 2
    for name in (first, second):
        job.stand(name, 2, 6, away=True, met=True)
    view = job.tell()
    assert (view.world.number, view.over) == (2, 2), "the new one must promise to stay out of it"
    job.ranks[new] = Worker(new, WorkerState(away=True, over=view.over))
    view = job.tell()
    assert view.world.members == (first, second, new)
    assert view.broken == 2 < view.world.number == 3


def test_a_wait_for_a_rank_that_hangs_is_told_once() -> None:
    """Nobody else waits for it in its world, so no call of a rank ends with an error."""
    job = Job()
    first, second, third = job.begin()
    for name in (first, second):
        job.end(name, End.LOST)
    job.stand(third, 1, 4, away=True)
    view = job.tell()
    assert view.world.members == (third,)
    job.stand(third, 2, 4)
    told = "waited 5 s for the next commit of world 2"

    def lines() -> list[str]:
        return [line for line in job.scheduler.log if told in line]

    new = next(name for name in job.wanted.workers if name != third)
    job.tell(RULES.late + 1.0)
    assert not lines(), "nobody waits"
    job.ranks[new] = Worker(new, WorkerState(away=True, over=view.over))
    assert job.tell().meet == 2
    job.tell(0.9 * RULES.late)
    assert not lines(), "it may still compute"
    job.tell(0.2 * RULES.late)
    job.tell(RULES.late)
    assert len(lines()) == 1
    assert third in job.wanted.workers, "it may compute for so long"


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
    assert job.scheduler.outcome == ""


@pytest.mark.parametrize(
    ("silent", "done"),
    [((), True), ((), False), ((0, 1, 2), True), ((0,), True), ((1,), True), ((2,), True)],
)
def test_a_host_that_is_lost_at_the_end(silent: tuple[int, ...], done: bool) -> None:
    """Last words of its ranks count, if training had ended. The work of a silent one is not done,
    whichever it is."""
    job = Job()
    members = job.begin()
    for name in members:
        job.stand(name, 1, 9, away=True, finished=done)
    job.tell()
    for place, name in enumerate(members):
        job.stand(name, 1, 9)
        said = None if place in silent else End.WELL
        job.ranks[name] = job.ranks[name]._replace(announced=said)
    if silent != (0,):
        job.end(members[0], End.WELL)
    job.tell()
    job.scheduler.step(job.now + RULES.gone + 1)
    late = "a process was lost after others had succeeded"
    if done:
        assert job.scheduler.outcome == (late if silent else "")
    else:
        assert "a process succeeded before others" in str(job.scheduler.outcome)


def test_others_that_are_lost_at_the_end_do_not_count() -> None:
    """A host that was cut off tells late how ranks of an earlier world have died."""
    job = Job()
    members = job.begin()
    for name in members:
        job.stand(name, 1, 9, away=True, finished=True)
    assert job.tell().done
    for name in members:
        job.end(name, End.WELL)
    stranger = Worker("0.9", WorkerState(), End.LOST, "was killed by SIGKILL", -9)
    first, *_ = members
    own, job.ranks[first] = job.ranks[first], Worker(first)
    job.tell()  # two have ended well
    job.scheduler.receive(AgentStatus("b", 1, "b", 3, (stranger,)), job.now)
    job.ranks[first] = own
    job.tell()
    assert "a new process on b was killed by SIGKILL" in job.scheduler.log
    assert job.scheduler.outcome == ""


def test_who_is_done_goes_on_in_no_world_when_asked_to_leave() -> None:
    job = Job()
    for name in job.begin():
        job.stand(name, 1, 9, away=True, finished=True)
    assert job.tell().done
    job.scheduler.ending.leave()
    first = next(iter(job.ranks))
    job.ranks[first] = job.ranks[first]._replace(end=End.LOST)
    view = job.tell()
    assert view.done
    assert view.world.number == 1


def test_the_programs_own_failure_ends_the_job() -> None:
    job = Job()
    first = job.begin()[0]
    job.ranks[first] = job.ranks[first]._replace(end=End.FAILED, text="failed: ValueError: no")
    job.tell()
    assert job.wanted.workers == ()
    for name, rank in job.ranks.items():
        job.ranks[name] = rank._replace(end=rank.end or End.LOST)
    job.tell()
    assert job.scheduler.outcome == "rank 0 on a failed: ValueError: no"


def test_one_that_leaves_is_replaced_and_is_no_failure() -> None:
    job = Job()
    first, second, third = job.begin()
    job.end(third, End.LEFT)
    for name in (first, second):
        job.stand(name, 1, 5, away=True)
    world = job.tell().world
    assert (world.number, world.members) == (2, (first, second))
    assert len(job.wanted.workers) == 3
    assert "rank 2 on a left" in job.scheduler.log


def test_the_first_world_begins_with_the_commit_on_the_disk() -> None:
    """Of an earlier command, whose worlds have smaller numbers, or of a job under mpirun."""
    job = Job(disk=Commit(3, 7))
    for name in job.wanted.workers:
        job.ranks[name] = Worker(name, WorkerState(away=True))
    world = job.tell().world
    assert (world.number, world.start, world.from_disk) == (4, Commit(3, 7), True)


def test_calls_are_counted() -> None:
    """Who has finished the second call does not go on when the first has ended."""
    job = Job()
    members = job.begin()
    for call in (1, 2):
        for name in members:
            job.stand(name, 1, 9, away=True, finished=call)
        assert job.tell().done == call
        for name in members:
            job.stand(name, 1, 9)
        assert job.tell().done == call, "they train on, in the same world"
    member = Member("x")
    member.receive(View(done=1))
    member.wait(finished=True)
    assert (member.state.finished, member.stay()) == (2, False)
    member.receive(View(done=2))
    assert member.stay()
    assert member.state == WorkerState()


def test_who_waits_with_a_commit_does_not_end_before_it_is_saved() -> None:
    member = Member("x")
    member.wait(met=True)
    member.receive(View(leave=True))
    assert member.ends
    member.receive(View(World(1, ("x", "y"))))
    assert member.enter()
    member.committed()
    member.wait()
    member.receive(View(World(1, ("x", "y")), over=1, leave=True))
    assert not member.ends
    member.receive(View(World(1, ("x", "y")), over=1, leave=True, lost=True))
    assert member.ends, "no supervisor decides on the next world"
    member.receive(View(World(2, ("x",)), over=1, leave=True))
    assert member.enter()


def test_nobody_joins_a_later_call() -> None:
    """A new process would begin with the first one."""
    job = Job()
    members = job.begin()
    for name in members:
        job.stand(name, 1, 9, away=True, finished=1)
    job.tell()
    job.end(members[2], End.LOST)
    for name in members[:2]:
        job.stand(name, 1, 9, away=True)
    world = job.tell().world
    assert (world.number, world.members) == (2, tuple(members[:2]))
    assert len(job.wanted.workers) == 2


def test_slots_that_are_taken_away() -> None:
    """Their ranks train on until the others meet; then they are ended."""
    job = Job()
    first, second, third = job.begin()
    job.scheduler.workers.set_slots({"a": 2})
    assert job.tell().meet == 1
    assert set(job.wanted.workers) == {first, second, third}
    for name in (first, second, third):
        job.stand(name, 1, 6, away=True, met=True)
    world = job.tell().world
    assert (world.number, len(world.members), world.start) == (2, 2, Commit(1, 6))
    for name in world.members:
        job.stand(name, 2, 6)
    job.tell()
    assert set(job.wanted.workers) == set(world.members)
    job.scheduler.workers.set_slots({"a": 3})
    job.tell()
    assert len(job.wanted.workers) == 3


def test_a_host_rests_though_its_agent_is_another_one() -> None:
    job = Job()
    job.begin()
    job.scheduler.receive(AgentStatus("b", 1, "b", 3, ()), job.now)
    workers = job.scheduler.workers
    assert (workers.last_heard("b"), workers.last_heard("c")) == (0.0, -1.0)
    job.scheduler.receive(AgentStatus("second", 1, "a", 3, ()), job.now)
    assert "a gets no new rank for 40 s" in job.scheduler.log, "three were lost"
    for now, number in ((39.9, 0), (40.1, 3)):
        job.scheduler.receive(AgentStatus("second", int(now), "a", 3, ()), now)
        assert len(job.scheduler.step(now)["second"].workers) == number


@pytest.mark.parametrize("grows", [False, True])
def test_a_host_that_is_taken_away_gets_no_new_process(grows: bool) -> None:
    """Whoever has left it is not replaced there. When all hosts go, and no other one can come, all
    leave."""
    job = Job(rules=replace(RULES, grows=grows))
    first, second, third = job.begin()
    job.scheduler.receive(AgentStatus("b", 1, "b", 3, ()), job.now)
    assert not job.tell(going=True).leave
    job.end(first, End.LEFT)
    for name in (second, third):
        job.stand(name, 1, 5, away=True, met=True)
    for _ in range(2):  # then they rest no more
        job.tell(20.0, going=True)
        assert set(job.wanted.workers) <= {second, third}
    assert not any("gets no new rank" in line for line in job.scheduler.log)
    job.scheduler.receive(AgentStatus("b", 2, "b", 3, (), True), job.now)
    assert job.tell(going=True).leave == (not grows)


def test_those_that_join_begin_anew_where_nobody_holds_a_state() -> None:
    """They have left init() alone; the others wait in it."""
    start = Commit(1, 5)
    old = Worker("1.1", WorkerState(away=True))
    new = Worker("1.9+", WorkerState(away=True))
    record = Record(World(1, ("1.0",)))
    assert choose([old, new], record, False, ()) == ([], [new])
    held = Worker("1.1", WorkerState(1, True, commit=start))
    assert choose([held, new], record, False, ()) == ([held, new], [])
    assert choose([new], record, False, ()) == ([new], [])


def test_a_process_that_shall_join_and_hangs_is_not_waited_for() -> None:
    job = Job()
    first, second, third = job.begin()
    job.end(third, End.LOST)
    for name in (first, second):
        job.stand(name, 1, 5, away=True)
    assert job.tell().world.members == (first, second)
    assert any(name.endswith("+") for name in job.wanted.workers)
    job.end(first, End.LOST)  # when nobody has a commit of world 2
    job.ranks[second] = Worker(second, WorkerState(2, True, commit=Commit(1, 5)))
    assert job.tell().world[:2] == (3, (second,))


def test_who_has_not_entered_the_world_when_others_have_waited_is_ended() -> None:
    """Its agent's words came, its program hangs."""
    job = Job()
    first, second, third = job.begin()
    for name in (first, second, third):
        job.stand(name, 1, 5, away=True)
    assert job.tell().world.members == (second, first, third) or job.wanted.view.world.number == 2
    for name in (first, second):
        standing = WorkerState(2, True, commit=Commit(1, 5), stalled=True)
        job.ranks[name] = Worker(name, standing)
    over = job.tell().over
    job.ranks[third] = Worker(third, WorkerState(1, True, over, Commit(1, 5)))
    job.tell()
    assert third not in job.wanted.workers
    assert "rank 2 on a hangs: it is killed" in job.scheduler.log


def wanted(number: int, heard: int, *ranks: str) -> Assignment:
    return Assignment(number, heard, ranks, View())


def test_an_agent_obeys_the_latest_words() -> None:
    agent = Agent("a", "a", 3, 10.0, 0.0)
    assert agent.receive(wanted(5, 0, "x")) == [Start("x")]
    assert agent.receive(wanted(5, 0)) == []
    assert agent.receive(wanted(7, 0)) == [Kill("x")]
    assert agent.receive(wanted(6, 0, "y")) == []
    agent.ended("x", End.LOST)
    assert agent.receive(wanted(8, 0)) == []
    (ended,) = agent.status(1.0).workers
    assert ended.end is End.LOST, "the supervisor has not heard that yet, and waits for it"
    agent.receive(wanted(9, 0))
    assert agent.status(2.0).workers == (ended,)
    agent.receive(wanted(10, 1))
    assert agent.status(3.0).workers == ()


def test_an_agent_whose_host_is_taken_away() -> None:
    """It starts nothing more, ends whoever has not left in time, and waits for the supervisor."""
    agent = Agent("a", "a", 3, 10.0, 0.0)
    agent.receive(wanted(1, 0, "x"))
    agent.drain(5.0)
    assert agent.status(1.0).draining
    assert agent.receive(wanted(2, 1, "x", "y"))[1:] == [], "y is not started"
    assert {rank.name: rank.end for rank in agent.status(1.0).workers} == {"x": None, "y": End.LEFT}
    assert agent.tick(5.0) == []
    assert agent.tick(5.1) == [Kill("x")]
    agent.ended("x", End.LOST)
    assert not agent.drained, "the supervisor does not know"
    agent.receive(wanted(3, 2))
    assert not agent.drained
    agent.receive(wanted(4, agent.status(5.2).number))
    assert agent.drained


def test_an_agent_without_a_supervisor_asks_its_ranks_to_leave_and_then_ends_them() -> None:
    agent = Agent("a", "a", 3, 10.0, 0.0)
    agent.receive(wanted(1, agent.status(0.0).number, "x"))
    assert agent.tick(5.0) == []
    (action,) = agent.tick(5.1)
    assert isinstance(action, Tell)
    assert action.view.leave
    assert action.view.lost
    assert agent.orphaned
    assert agent.tick(5.2) == [], "once"
    agent.receive(wanted(2, agent.status(6.0).number, "x"))
    assert agent.tick(10.5) == [], "the supervisor has answered"
    assert agent.tick(16.1) == [Kill("x")]
    assert agent.lease_expired(16.1)
    assert not agent.idle
    agent.ended("x", End.LOST)
    assert agent.idle
