# SPDX-License-Identifier: Apache-2.0
"""The supervisor's decisions: which processes an elastic job has, and who is in its next world.

What keeps two worlds from going on side by side: training needs every member of a world at every
commit. So when one is dead, or waits for the next world, the present one makes no commit any more.
A world is decided only then; and only when a process that has a commit of the present one is there,
or when no process that may have one lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from farandole.errors import counted
from farandole.membership.crew import Crew, News
from farandole.membership.ending import Ending
from farandole.membership.next_world import (
    Record,
    choose,
    ended_well,
    has_ended,
    is_away,
    is_broken,
    is_here,
    is_new,
    names_hanging,
    next_world,
)
from farandole.membership.words import NOTHING, Commit, End, Rank, Status, View, Wanted


class NotReady(Exception):
    """The disk has not answered yet. The text says what it does instead."""


@dataclass(frozen=True)
class Rules:
    """How a job is run. Times are in seconds."""

    least: int  # ranks that a world has at least
    most: int  # and at most
    silence: float = 5.0  # after which an agent's processes are not waited for
    lease: float = 30.0  # after which an agent has ended its processes
    late: float = 300.0  # for a rank to come when others wait; then it hangs, and is ended
    stalled: float = 0.3  # the same if one has noticed already that another hangs
    gather: float = 2.0  # for agents to call, when the job begins
    patience: float = 600.0  # without a world
    restarts: int = 3  # times that all ranks may be lost without a commit between
    cooldown: tuple[float, float] = (10.0, 600.0)  # of a host of several, after a death there
    grows: bool = False  # hosts may come that nobody knows yet

    @property
    def deaf(self) -> float:
        """Seconds of silence after which the supervisor ends an agent, and starts another one: it
        should have ended its processes; clocks may differ."""
        return 1.2 * self.lease

    @property
    def gone(self) -> float:
        """Seconds of silence after which a host's processes have ended."""
        return self.deaf + self.silence


class Decider:
    """The supervisor. Whoever runs it tells what agents say, calls step() after that and at every
    beat, and sends what it returns. It is over when `outcome` is set."""

    def __init__(self, rules: Rules, disk: Callable[[], Commit], now: float) -> None:
        """`disk`: returns the newest commit there, or raises NotReady; step() asks again then."""
        self._rules, self._disk = rules, disk
        self._record = Record()
        self._began = self._without = now  # _without: since when there is no world
        self.crew = Crew(rules.silence, rules.cooldown)  # what agents have told
        self._sent = 0
        self._idle = 0  # deaths since the last progress; a world that failed counts as its ranks'
        self._unready = ""  # why the disk holds up the next world
        self._awaited: set[str] = set()  # ranks that have not come, where others wait
        self._late = float("inf")  # when these are ended
        self.ending = Ending()
        self.worlds = 0  # how many were decided
        self.story: list[str] = []  # sentences for the user; whoever reads them clears them
        self.outcome: str | None = None  # "": well; else why the job has failed

    def hear(self, status: Status, now: float) -> None:
        """Takes what an agent says."""
        self._take(self.crew.hear(status, now), now)

    def _take(self, news: Iterable[News], now: float) -> None:
        """Who has ended well first: others that are lost with it are lost late."""
        for one in sorted(news, key=lambda one: not ended_well(one.now, self._record)):
            self._note(one, now)

    def _note(self, news: News, now: float) -> None:
        rank = news.now
        known = max(self._record.world.start, news.before.standing.commit)
        if rank.standing.commit > known:
            self._idle = 0
        if ended_well(rank, self._record):
            self.ending.well = True
        elif rank.end is End.FAILED:
            self.ending.fail(self._named(news.host, rank.name, rank.text), rank.code)
        elif rank.end is End.LOST:
            self._lose(news.host, rank.name, rank.text, now)
        elif rank.end is End.LEFT and not self.ending.leaves:
            self._rest(news.host, self._named(news.host, rank.name, "left"), now)

    def _lose(self, host: str, name: str, how: str, now: float) -> None:
        self._idle += not self.ending.leaves
        if name in self._record.world.members or not self._record.done:
            self.ending.lose()  # else it has nothing to do with how training has ended
        self._rest(host, self._named(host, name, how), now)

    def _rest(self, host: str, why: str, now: float) -> None:
        self.story.append(why)
        if self.ending.failure or self.ending.leaves:
            return
        if seconds := self.crew.rest(host, now):
            self.story.append(f"{host} gets no new rank for {seconds:g} s")

    def _named(self, host: str, name: str, how: str) -> str:
        members = self._record.world.members
        what = f"rank {members.index(name)}" if name in members else "a new process"
        return f"{what} on {host} {how}"

    # ---- a step

    def step(self, now: float) -> dict[str, Wanted]:
        """What each agent is to hear now."""
        self._take(self.crew.forget(now - self._rules.gone), now)
        self._end_where_it_ends(now)
        if not self.ending.failure and (self.ending.leaves or not self.ending.well):
            self._unready = ""
            try:
                self._decide(now)
            except NotReady as reason:
                self._unready = str(reason)
        if not self.ending.begun:
            self._start_and_end(now)
        self._sent += 1
        world, done = self._record.world, self._record.done
        over = world.number if self._over() else world.number - 1
        broken = world.number if is_broken(self.crew.all(), self._record) else world.number - 1
        meet = world.number if self._should_meet(now) else 0
        view = View(world, over, broken, meet, self.ending.leaves, done)
        return {
            name: Wanted(self._sent, heard, () if self.ending.failure else ranks, view)
            for name, heard, ranks in self.crew.wanted()
        }

    # ---- the end

    def _end_where_it_ends(self, now: float) -> None:
        rules, done = self._rules, self._record.done
        size = max(1, len(self._record.world.members), rules.least)
        if self._idle >= (rules.restarts + 1) * size:
            self.ending.fail(f"{counted(self._idle, 'failure')} without a commit: that is enough")
        if now > self._without + rules.patience and not self.ending.begun:
            why = f"hosts for {counted(rules.least, 'rank')}"
            why = f"a world, because of the disk: {self._unready}" if self._unready else why
            self.ending.fail(f"{rules.patience:g} s (--elastic-timeout) without {why}")
        if self.ending.well and not self.ending.leaves:
            members = self._record.world.members
            if done:
                self.crew.drop(x.name for x in self.crew.alive() if x.name not in members)
            waits = [rank for rank in self.crew.alive() if is_away(rank, self._record)]
            if waits or (self.ending.lost_late and not done):
                self.ending.fail("a process ended well when others had not finished")
        if self.crew.all_go() and not (rules.grows or self.ending.begun):
            self.ending.leave()
        if self.ending.begun and not self.crew.alive():
            self.outcome = self.ending.outcome

    # ---- worlds

    def _over(self) -> bool:
        """Whether the present world makes no commit any more."""
        known = {rank.name: rank for rank in self.crew.all()}
        members = self._record.world.members
        if not known.keys() >= set(members):
            return True  # the host of one was forgotten
        found = [known[name] for name in members]
        return not members or any(x.end is not None or is_here(x, self._record) for x in found)

    def _should_meet(self, now: float) -> bool:
        """Whether others wait to be in the world, or some members' hosts go."""
        world, near = self._record.world, self.crew.near(now)
        if world.number == 0 or self._record.done:
            return False
        unwanted = self.crew.unwanted(world.members)
        new = [
            x
            for x in near
            if is_away(x, self._record) and x.name not in {*world.members, *unwanted}
        ]
        stay = [name for name in world.members if name not in unwanted]
        if len(stay) < len(world.members):
            return len(stay) + len(new) >= self._rules.least
        return bool(new) and len(stay) < self._rules.most

    def _decide(self, now: float) -> None:
        """Decides the next world, or that training is done, or waits."""
        world = self._record.world
        if not self._over():
            self._without, self._late = now, float("inf")
            return
        near = self.crew.near(now)
        here = [rank for rank in near if is_here(rank, self._record)]
        if hanging := names_hanging(here, self._record.world):
            self._end_late(hanging, now)
            return
        if has_ended(here, world):
            self._record = Record(world, self._record.done + 1)
            return
        newest = [x for x in here if x.standing.commit.world == world.number > 0]
        # Members that are left of a world that is over are awaited, even if nobody is here.
        left = not self._record.done and any(rank.name in world.members for rank in near)
        if not ((here or left) and self._all_came(near, here, bool(newest), now) and here):
            return
        if not newest and not self._all_known(here):
            return
        unwanted = self.crew.unwanted(world.members)
        chosen, ended = choose(here, self._record, bool(newest), unwanted)
        if newest and self._record.done and len(chosen) < self._rules.least:
            ended = here  # new ones can't begin with a later call: all begin anew, from the disk
        self.crew.drop(rank.name for rank in ended)
        if chosen and self._enough(chosen, near, now):
            self._enter(chosen, bool(newest))

    def _end_late(self, names: Iterable[str], now: float) -> None:
        for host, rank in self.crew.drop(names):
            self._lose(host, rank.name, "hangs: it is ended", now)

    def _all_came(self, near: list[Rank], here: list[Rank], newest: bool, now: float) -> bool:
        """Whether all are here that the decision waits for; ends those that are late."""
        others = [rank for rank in near if rank not in here and not is_new(rank, self._record)]
        members = [rank for rank in others if rank.name in self._record.world.members]
        joining = [rank for rank in others if rank.standing.away]
        needed = members if newest else others
        awaited = {rank.name for rank in (*needed, *joining)}
        if awaited != self._awaited:  # each gets its whole time: one may have started just now
            self._awaited, self._late = awaited, float("inf")
        if not awaited:
            return True
        noticed = any(rank.standing.stalled for rank in here)
        short = not needed or (noticed and bool(members))
        limit = self._rules.stalled if short else self._rules.late
        self._late = min(self._late, now + limit)
        if now < self._late:
            return False
        self._late = float("inf")
        self._end_late([rank.name for rank in members or needed], now)
        return True

    def _all_known(self, here: list[Rank]) -> bool:
        """Whether all processes that may have the newest commit are here, or have ended."""
        held = [rank for rank in self.crew.alive() if not is_new(rank, self._record)]
        return not self.crew.any_dropped() and all(rank in here for rank in held)

    def _enough(self, here: list[Rank], near: list[Rank], now: float) -> bool:
        if len(here) < self._rules.least and not self.ending.leaves:
            return False
        if len(here) >= self._rules.most or any(r.standing.commit != NOTHING for r in here):
            return True
        return now >= self._began + self._rules.gather and len(here) == len(near)

    def _enter(self, here: list[Rank], newest: bool) -> None:
        before = self._record.world
        failed = not (newest or all(rank.standing.met for rank in here))
        # Before the first world the disk may have the commit of an earlier job.
        disk = NOTHING if newest else self._disk()
        world = next_world(before, here, disk, self._rules.most)
        self._record = Record(world, self._record.done if newest else 0)
        self._late = float("inf")
        if failed and {rank.name for rank in here}.issuperset(before.members):
            self._idle += len(before.members)  # it never began, though nobody was lost
        self.worlds += 1
        begin = f"world {world.number}: {counted(len(world.members), 'rank')}"
        state = f"commit {world.start.number}" + " on the disk" * world.from_disk
        self.story.append(begin if world.start == NOTHING else f"{begin} from {state}")

    # ---- processes

    def _start_and_end(self, now: float) -> None:
        """Starts processes where some are missing, and ends those that are too many."""
        world, most = self._record.world, self._rules.most
        near = self.crew.near(now)
        trains = any(rank.standing.commit.world == world.number > 0 for rank in near)
        held = any(rank.standing.commit != NOTHING for rank in near)
        if held and self._record.done:
            return
        # Survivors that meet need the cores; whoever is started now would be late for them.
        meets = trains and self._over() and len(near) >= self._rules.least
        if not meets:
            self.crew.fill(most, now, held)
        if trains and not self._over():
            unwanted = self.crew.unwanted(world.members).difference(world.members)
            self.crew.drop([*self.crew.surplus(most, world.members, now), *unwanted])
