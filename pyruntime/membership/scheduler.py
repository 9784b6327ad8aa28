# SPDX-License-Identifier: Apache-2.0
"""Decides which processes an elastic job has, and which of them are in its next world.

Two worlds never train at the same time, because a commit needs every member of its world. Once a
member has ended or waits for the next world, the present world can make no more commits. Only then
does the scheduler decide on a new world. To do so, it needs either a waiting process that has a
commit of the present world, or the certainty that no living process has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from farandole.errors import counted
from farandole.membership.ending import Ending
from farandole.membership.messages import (
    NOTHING,
    AgentStatus,
    Assignment,
    Commit,
    End,
    View,
    Worker,
)
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
from farandole.membership.workers import Change, Workers


class NotReady(Exception):
    """Raised if the disk has not answered yet. The text gives the reason."""


@dataclass(frozen=True)
class Policy:
    """The limits of a job. Times are in seconds."""

    least: int  # least number of ranks in a world
    most: int  # greatest number of ranks in a world
    silence: float = 5.0  # agents that have not reported for this long are not waited for
    lease: float = 30.0  # an agent that gets no answer for this long kills its processes
    late: float = 300.0  # a rank is killed if others have waited for it this long
    stalled: float = 2.0  # replaces `late` once a rank has reported that another one hangs
    gather: float = 2.0  # how long to wait for more agents before the first world
    patience: float = 600.0  # the job fails if it has no world for this long
    restarts: int = 3  # number of times all ranks may be lost without a commit in between
    cooldown: tuple[float, float] = (10.0, 600.0)  # shortest and longest cooldown, for Workers
    grows: bool = False  # True if a discovery script may name new hosts

    @property
    def deaf(self) -> float:
        """Seconds without a report after which the supervisor replaces an agent. By then the
        agent's lease has ended, even if its clock runs slower than the supervisor's."""
        return 1.2 * self.lease

    @property
    def gone(self) -> float:
        """Seconds without a report after which all processes of a host must have ended."""
        return self.deaf + self.silence


class Scheduler:
    """Makes the decisions for one job. The caller passes agents' reports to receive(), calls step()
    after each report and at every heartbeat, and sends the messages that step() returns. The job is
    over once `outcome` is set. This class is not thread-safe."""

    def __init__(self, policy: Policy, disk: Callable[[], Commit], now: float) -> None:
        """`disk` returns the newest commit on the disk. If it raises NotReady, the next step()
        calls it again."""
        self._policy, self._disk = policy, disk
        self._record = Record()
        self._began = self._worldless_since = now
        self.workers = Workers(policy.silence, policy.cooldown)
        self._sent = 0
        self._idle = 0  # ranks lost since the last commit; a failed world counts as all its ranks
        self._unready = ""  # why the disk delays the next world
        self._late_at: dict[str, float] = {}  # when each awaited process is killed
        self._meets = 0  # the world whose members must meet, or 0 if there is none
        self._told_at = inf  # when _tell_of_wait() logs that they have not met
        self.ending = Ending()
        self.worlds = 0  # number of worlds so far
        self.log: list[str] = []  # lines for the user; the caller clears it
        self.outcome: str | None = None  # "" for success, or the reason for the failure

    def receive(self, status: AgentStatus, now: float) -> None:
        """Applies an agent's report."""
        self._apply_all(self.workers.receive(status, now), now)

    def _apply_all(self, changes: Iterable[Change], now: float) -> None:
        """Applies successful ends first, because losses in the same report came after them."""
        for one in sorted(changes, key=lambda one: not ended_well(one.now, self._record)):
            self._apply(one, now)

    def _apply(self, news: Change, now: float) -> None:
        worker = news.now
        # The commit from which a world starts is not progress, even if a rank has just received it.
        known = max(self._record.world.start, news.before.state.commit)
        if worker.state.commit.number > known.number:
            self._idle = 0
        if ended_well(worker, self._record):
            self.ending.well = True
        elif worker.end is End.FAILED:
            self.ending.fail(self._describe(news.host, worker.name, worker.text), worker.code)
        elif worker.end is End.LOST:
            self._count_loss(news.host, worker.name, worker.text, now)
        elif worker.end is End.LEFT and not self.ending.leaves:
            self._cool_down(news.host, self._describe(news.host, worker.name, "left"), now)

    def _count_loss(self, host: str, name: str, how: str, now: float) -> None:
        self._idle += not self.ending.leaves
        if name in self._record.world.members or not self._record.done:
            self.ending.lose()  # after training, only losses of members count
        self._cool_down(host, self._describe(host, name, how), now)

    def _cool_down(self, host: str, why: str, now: float) -> None:
        self.log.append(why)
        if self.ending.failure or self.ending.leaves:
            return
        if seconds := self.workers.cool_down(host, now):
            self.log.append(f"{host} gets no new rank for {seconds:g} s")

    def _describe(self, host: str, name: str, how: str) -> str:
        members = self._record.world.members
        what = f"rank {members.index(name)}" if name in members else "a new process"
        return f"{what} on {host} {how}"

    # ---- a step

    def step(self, now: float) -> dict[str, Assignment]:
        """Makes decisions and returns a message for each agent."""
        self._apply_all(self.workers.forget_silent(now - self._policy.gone), now)
        self._check_end(now)
        if not self.ending.failure and (self.ending.leaves or not self.ending.well):
            self._unready = ""
            try:
                self._decide(now)
            except NotReady as reason:
                self._unready = str(reason)
        if not self.ending.begun:
            self._adjust_processes(now)
        self._sent += 1
        world, done = self._record.world, self._record.done
        over = world.number if self._is_over() else world.number - 1
        broken = world.number if is_broken(self.workers.all(), self._record) else world.number - 1
        meet = world.number if self._should_meet(now) else 0
        self._tell_of_wait(meet, now)
        view = View(world, over, broken, meet, self.ending.leaves, done)
        return {
            name: Assignment(self._sent, heard, () if self.ending.failure else ranks, view)
            for name, heard, ranks in self.workers.wanted()
        }

    # ---- the end

    def _check_end(self, now: float) -> None:
        policy, done = self._policy, self._record.done
        size = max(1, len(self._record.world.members), policy.least)
        if self._idle >= (policy.restarts + 1) * size:
            self.ending.fail(f"{counted(self._idle, 'failure')} without a commit: giving up")
        if now > self._worldless_since + policy.patience and not self.ending.begun:
            why = f"hosts for {counted(policy.least, 'rank')}"
            why = f"a world, because of the disk: {self._unready}" if self._unready else why
            self.ending.fail(f"{policy.patience:g} s (--elastic-timeout) without {why}")
        if self.ending.well and not self.ending.leaves:
            members = self._record.world.members
            if done:
                self.workers.stop(x.name for x in self.workers.alive() if x.name not in members)
            waits = [worker for worker in self.workers.alive() if is_away(worker, self._record)]
            if waits or (self.ending.lost_late and not done):
                self.ending.fail("a process succeeded before others had finished")
        if self.workers.all_draining() and not (policy.grows or self.ending.begun):
            self.ending.leave()
        if self.ending.begun and not self.workers.alive():
            self.outcome = self.ending.outcome

    # ---- worlds

    def _is_over(self) -> bool:
        """Returns True if the present world can make no more commits."""
        known = {worker.name: worker for worker in self.workers.all()}
        members = self._record.world.members
        if not known.keys() >= set(members):
            return True  # a member was removed together with its host
        found = [known[name] for name in members]
        return not members or any(x.end is not None or is_here(x, self._record) for x in found)

    def _should_meet(self, now: float) -> bool:
        """Returns True if members must meet after their next commit, either because other processes
        wait to join or because members have lost their slots."""
        world, near = self._record.world, self.workers.reachable(now)
        if world.number == 0 or self._record.done:
            return False
        unwanted = self.workers.unwanted(world.members)
        new = [
            x
            for x in near
            if is_away(x, self._record) and x.name not in {*world.members, *unwanted}
        ]
        stay = [name for name in world.members if name not in unwanted]
        if len(stay) < len(world.members):
            return len(stay) + len(new) >= self._policy.least
        return bool(new) and len(stay) < self._policy.most

    def _tell_of_wait(self, meet: int, now: float) -> None:
        """Logs once that the members of world `meet`, which must meet after their next commit, have
        made no commit for a long time. `meet` is 0 if no world must meet."""
        if meet != self._meets:
            self._meets, self._told_at = meet, now + self._policy.late if meet else inf
        elif now > self._told_at:
            self._told_at = inf
            self.log.append(
                f"other ranks have waited {self._policy.late:g} s for the next commit of world "
                f"{meet}; remedy: if its ranks hang, `farandole dump` shows where; if they compute "
                "for that long, commit more often"
            )

    def _decide(self, now: float) -> None:
        """Decides on a new world or that a call of train() is done, if either is possible now."""
        world = self._record.world
        if not self._is_over():
            self._worldless_since, self._late_at = now, {}
            return
        near = self.workers.reachable(now)
        here = [worker for worker in near if is_here(worker, self._record)]
        if hanging := names_hanging(here, self._record.world):
            self._kill_late(hanging, now)
            return
        if has_ended(here, world):
            self._record = Record(world, self._record.done + 1)
            return
        newest = [x for x in here if x.state.commit.world == world.number > 0]
        # True if members of the world that is over are left. They must be waited for, even if none
        # of them is waiting yet.
        left = not self._record.done and any(worker.name in world.members for worker in near)
        if not ((here or left) and self._all_wait(near, here, bool(newest), now) and here):
            return
        if not newest and not self._all_known(here):
            return
        unwanted = self.workers.unwanted(world.members)
        chosen, ended = choose(here, self._record, bool(newest), unwanted)
        if newest and self._record.done and len(chosen) < self._policy.least:
            # New ranks can't join in a later call, so all ranks restart from the disk.
            ended = here
        self.workers.stop(worker.name for worker in ended)
        if chosen and self._enough(chosen, near, now):
            self._enter(chosen, bool(newest))

    def _kill_late(self, names: Iterable[str], now: float) -> None:
        for host, worker in self.workers.stop(names):
            self._count_loss(host, worker.name, "hangs: it is killed", now)

    def _all_wait(self, near: list[Worker], here: list[Worker], newest: bool, now: float) -> bool:
        """True if every process that the decision needs is waiting. Kills processes that are
        late."""
        others = [x for x in near if x not in here and not is_new(x, self._record)]
        members = [worker for worker in others if worker.name in self._record.world.members]
        joining = [worker for worker in others if worker.state.away]
        needed = members if newest else others
        noticed = any(worker.state.stalled for worker in here)
        short = not needed or (noticed and bool(members))
        limit = now + (self._policy.stalled if short else self._policy.late)
        awaited = [worker.name for worker in (*needed, *joining)]
        self._late_at = {name: min(self._late_at.get(name, limit), limit) for name in awaited}
        late = [x.name for x in members or needed if self._late_at[x.name] <= now]
        self._kill_late(late, now)
        return all(at <= now for at in self._late_at.values())

    def _all_known(self, here: list[Worker]) -> bool:
        """Returns True if every process that may have the newest commit is waiting or has ended."""
        held = [worker for worker in self.workers.alive() if not is_new(worker, self._record)]
        return not self.workers.any_stopping() and all(worker in here for worker in held)

    def _enough(self, here: list[Worker], near: list[Worker], now: float) -> bool:
        if len(here) < self._policy.least and not self.ending.leaves:
            return False
        if len(here) >= self._policy.most or any(r.state.commit != NOTHING for r in here):
            return True
        return now >= self._began + self._policy.gather and len(here) == len(near)

    def _enter(self, here: list[Worker], newest: bool) -> None:
        before = self._record.world
        failed = not all(worker.state.met for worker in here)
        # Before the first world, the disk may hold a commit that an earlier command made.
        disk = NOTHING if newest else self._disk()
        world = next_world(before, here, disk, self._policy.most)
        self._record = Record(world, self._record.done if newest else 0)
        self._late_at = {}
        if failed and {worker.name for worker in here}.issuperset(before.members):
            self._idle += len(before.members)  # no process was lost, so no loss was counted
        self.worlds += 1
        begin = f"world {world.number}: {counted(len(world.members), 'rank')}"
        state = f"commit {world.start.number}" + " on the disk" * world.from_disk
        self.log.append(begin if world.start == NOTHING else f"{begin} from {state}")

    # ---- processes

    def _adjust_processes(self, now: float) -> None:
        """Starts missing processes and kills surplus ones."""
        world, most = self._record.world, self._policy.most
        near = self.workers.reachable(now)
        trains = any(worker.state.commit.world == world.number > 0 for worker in near)
        held = any(worker.state.commit != NOTHING for worker in near)
        if held and self._record.done:
            return
        # No process is started while survivors meet. A new process would compete for their cores
        # and would come too late.
        meets = trains and self._is_over() and len(near) >= self._policy.least
        if not meets:
            self.workers.start_missing(most, now, held)
        if trains and not self._is_over():
            unwanted = self.workers.unwanted(world.members).difference(world.members)
            self.workers.stop([*self.workers.surplus(most, world.members, now), *unwanted])
