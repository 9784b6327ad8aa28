# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs with simulated hosts, networks and time. `python -m simulation.elastic FIRST NUMBER`
runs so many seeds, from tests/. Each draws deaths, hangs, cut networks, hosts that come and are
taken away, supervisors that die, and a disk that fails; messages are lost, late and repeated. What
must hold is asserted.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from farandole.membership.agent import Action, Agent, Kill, Start
from farandole.membership.member import Member
from farandole.membership.messages import Commit, End, View, World
from farandole.membership.scheduler import Scheduler
from simulation.book import RULES, Book
from simulation.disk import Disk, Saver

__all__ = ["Simulation"]

SAMPLES = 200
FAULTS_UNTIL, LONGEST = 60.0, 2000.0  # simulated seconds
BEAT, LIMIT = 1.0, 4.0  # LIMIT: until ranks notice that one hangs or is cut off
GRACE = 5.0  # for ranks of a host that is taken away
ENDED = RULES.lease + 2 * BEAT + 1  # after it no rank is left whose supervisor has died


class Fabric:
    """What carries the calls of one world: each ends when all members have made it."""

    def __init__(self, simulation: Simulation, world: World) -> None:
        self._simulation, self.world = simulation, world
        self._waiting: dict[str, tuple[Any, Callable[[list[Any]], None]]] = {}
        self._left: dict[str, bool] = {}  # by name: whether it crashed

    def call(self, rank: Process, given: Any, then: Callable[[list[Any]], None]) -> None:
        simulation = self._simulation
        self._waiting[rank.name] = given, then
        if self._left:
            self._fail(rank.name, simulation.random.uniform(0, 0.2))
        elif len(self._waiting) == len(self.world.members):
            all_given = [self._waiting[name][0] for name in self.world.members]
            for name, (_, action) in self._waiting.items():
                self._later(name, action, all_given)
            self._waiting.clear()
        else:
            simulation.later(LIMIT, rank.unless_it_goes_on(partial(self._give_up, rank)))

    def _later(self, name: str, action: Callable[[list[Any]], None], given: list[Any]) -> None:
        rank = self._simulation.processes[name]

        def end() -> None:
            if any(self._left.values()) and self._simulation.random.random() < 0.5:
                rank.fail(stalled=False)
            else:
                rank.turn += 1
                action(given)

        pause = self._simulation.random.uniform(0, 0.3)
        self._simulation.later(pause, rank.unless_it_goes_on(end))

    def _give_up(self, rank: Process) -> None:
        if rank.name in self._waiting:
            for name in list(self._waiting):
                self._fail(name, 0.0, stalled=True)

    def leave(self, name: str, crashed: bool) -> None:
        if name not in self._left:
            self._left[name] = crashed
            self._waiting.pop(name, None)
            for other in list(self._waiting):
                self._fail(other, self._simulation.random.uniform(0, 0.2))

    def _fail(self, name: str, seconds: float, stalled: bool = False) -> None:
        self._waiting.pop(name)
        rank = self._simulation.processes[name]
        fail = partial(rank.fail, stalled)
        self._simulation.later(seconds, rank.unless_it_goes_on(fail))


class Process:
    """A rank: its program counts samples."""

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.node = name, node
        self._simulation = node.simulation
        self._member = Member(name)
        self.turn = 0  # rises with each thing that it does
        self.lives, self.hangs = True, False
        self._signalled = self._trained = False
        self.was_killed = False  # not with its host
        self._count = self._saved = 0
        self._fabric: Fabric | None = None
        self._saver = Saver(self)
        self._later(self._simulation.random.uniform(0.2, 3), self._wait)

    @property
    def commit(self) -> Commit:
        return self._member.state.commit

    def can_act(self) -> bool:
        return self.lives and not self.hangs

    def unless_it_goes_on(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action`, which does nothing if this process has done something else before."""
        turn = self.turn

        def checked() -> None:
            if self.turn == turn and self.can_act():
                action()

        return checked

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._simulation.later(seconds, self.unless_it_goes_on(action))

    def hear(self, view: View) -> None:
        if not self.can_act() or self._trained:
            return
        before = self._member.state
        self._member.receive(view)
        if self._member.broken:
            self.fail(stalled=False)
        elif self._member.state != before:
            self._tell()
        self._go_on()

    def _tell(self) -> None:
        if not self.node.stopped:
            self.node.act(self.node.agent.report(self.name, self._member.state), later=True)
            self.node.send_status()

    def _wait(self, finished: bool = False, met: bool = False, stalled: bool = False) -> None:
        self.turn += 1
        if self._fabric is not None:
            self._fabric.leave(self.name, not (finished or met))
            self._fabric = None
        self._member.wait(finished, met, stalled)
        self._tell()
        self._go_on()

    def signal(self) -> None:
        """It leaves after its next commit; before and after its training a signal ends it."""
        self._signalled = True
        if self._member.state.world == 0 or self._trained:
            self.end(End.LOST)

    def fail(self, stalled: bool) -> None:
        if not (self._trained or self._saver.writes):  # a rank that writes notices it later
            self._count = self._saved
            self._wait(stalled=stalled)

    def _go_on(self) -> None:
        if self._member.stay():
            assert self._count == SAMPLES, "training has ended too early"
            self._simulation.book.leave(self.commit)
            self._trained = True
            self._later(self._simulation.random.uniform(0, 1), self._say_well)
        elif self._member.ends:
            self.end(End.LEFT)
        elif (world := self._member.enter()) is not None:
            self._tell()
            self._fabric = self._simulation.fabric(world)
            self._later(self._simulation.random.uniform(0, 0.2), lambda: self._sync(world))

    def _say_well(self) -> None:
        if not self.node.stopped:
            self.node.agent.announce(self.name, End.WELL)
            self.node.send_status()
        random = self._simulation.random
        if random.random() < 0.05:
            self._later(random.uniform(0, 1), partial(self._simulation.lose, self.node))
        self._later(random.uniform(0, 1), partial(self.end, End.WELL))

    def _sync(self, world: World) -> None:
        book = self._simulation.book
        found = self._saved
        if world.from_disk:
            assert book.disk == world.start, "the disk has another commit"
            found = book.disk_count
        elif world.members[0] == self.name:
            assert self.commit == world.start, "rank 0 has another commit"

        def synchronized(states: list[int]) -> None:
            self._count = self._saved = states[0]
            self._member.synchronized()
            book.saved(self.commit, self._count)
            self._tell()
            self._step()

        self._call(found, synchronized)

    def _call(self, given: Any, then: Callable[[list[Any]], None]) -> None:
        assert self._fabric is not None
        self._fabric.call(self, given, then)

    def _step(self) -> None:
        if self._count == SAMPLES:
            finish = partial(self._wait, finished=True)
            if self._is_first():
                self._saver.write(self._saved, self.commit, True, finish)
            else:
                finish()
            return
        pause = self._simulation.random.uniform(0, 0.6)

        def counted(counts: list[int]) -> None:
            assert len(set(counts)) == 1, f"ranks of one world have counted {counts}"
            self._count = min(SAMPLES, self._count + len(counts))
            self._commit()

        self._later(pause, lambda: self._call(self._count, counted))

    def _commit(self) -> None:
        book = self._simulation.book
        self._saved = self._count
        self._member.committed()
        book.saved(self.commit, self._saved)

        signalled = self._signalled
        due = self._is_first() and self._simulation.random.random() < 0.3

        def agreed(wishes: list[tuple[bool, bool, bool, bool]]) -> None:
            book.acknowledge(self.commit)
            meet, leave, some_leave, due = (any(each) for each in zip(*wishes, strict=True))
            self._tell()

            def written(_: list[Any]) -> None:
                if leave or (some_leave and self._signalled):
                    book.leave(self.commit)
                    self.end(End.LEFT)
                elif some_leave or meet:
                    self._wait(met=True)
                else:
                    self._step()

            if leave or some_leave or due:
                self._write(last=leave or some_leave, then=written)
            else:
                written([])

        self._call((self._member.meets, self._member.leaves, signalled, due), agreed)

    def _is_first(self) -> bool:
        assert self._fabric is not None
        return self._fabric.world.members[0] == self.name

    def _write(self, last: bool, then: Callable[[list[Any]], None]) -> None:
        """Rank 0 writes the commit, or begins to, and tells the others."""

        def tell() -> None:
            if self._member.broken:
                self.fail(stalled=False)
            else:
                self._call(None, then)

        if not self._is_first():
            self._call(None, then)
        elif last or self._simulation.disk.at_once or not self._saver.has_written:
            self._saver.write(self._saved, self.commit, last, tell)
        else:
            self._saver.begin(self._saved, self.commit)
            tell()

    def end(self, end: End) -> None:
        if self.lives:
            well = end in (End.WELL, End.LEFT)
            if self._fabric is not None:
                self._fabric.leave(self.name, not well)
            if well and self._saver.runs:  # Python waits for the thread
                self._trained = True
                self.turn += 1
                self._saver.join(partial(self.end, end))
                return
            self.lives = False
            if self.node.lives and not self.node.stopped:
                self.was_killed = end is End.LOST
                self.node.agent.ended(self.name, end, "killed", -9 * self.was_killed)
                # An agent takes all that has come before it says what has changed.
                pause = max(0.0, self._simulation.random.uniform(-0.1, 0.1))
                self._simulation.later(pause, self.node.send_status)


class Node:
    """An agent and its host."""

    def __init__(self, simulation: Simulation, name: str, host: str) -> None:
        self.simulation, self.name, self.host = simulation, name, host
        slots = simulation.random.randint(1, 4)
        self.agent = Agent(name, host, slots, RULES.lease, simulation.now)
        self.lives = True
        self.stopped = False  # the agent; its processes go on
        self.since = simulation.now
        self.processes: list[Process] = []
        simulation.later(simulation.random.uniform(0, BEAT), self._beat)

    def _beat(self) -> None:
        if self.lives:
            if not self.stopped:
                self.act(self.agent.tick(self.simulation.now))
                self.send_status()
            self.simulation.later(BEAT, self._beat)

    def send_status(self) -> None:
        if self.lives:
            status = self.agent.status(self.simulation.now)
            chief = self.simulation.chief
            self.simulation.send(self.host, chief.host, partial(chief.hear, status))

    def act(self, actions: list[Action], later: bool = False) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert not self.agent.draining, "a process is started on a host that is taken away"
                process = Process(action.name, self)
                self.simulation.processes[action.name] = process
                self.processes.append(process)
            elif isinstance(action, Kill):
                pause = self.simulation.random.uniform(0, 0.3)
                process = self.simulation.processes[action.name]
                self.simulation.later(pause, partial(process.end, End.LOST))
            elif later:
                process = self.simulation.processes[action.name]
                self.simulation.later(0.0, partial(process.hear, action.view))
            else:
                self.simulation.processes[action.name].hear(action.view)

    def hear(self, wanted: Any) -> None:
        if self.lives and not self.stopped:
            self.act(self.agent.receive(wanted))
            if self.agent.drained:
                self.lives = False

    def go(self) -> None:
        """Its host is taken away."""
        self.agent.drain(self.simulation.now + GRACE)
        for process in self.processes:
            if process.can_act():
                process.signal()
        self.send_status()
        self.simulation.later(GRACE + 2 * BEAT, self._check_left)

    def _check_left(self) -> None:
        left = [process.name for process in self.processes if process.lives]
        assert self.stopped or not left, f"{left} have not left"

    def die(self) -> None:
        self.lives = False
        for process in self.processes:
            process.end(End.LOST)


class Chief:
    """A supervisor and its host."""

    def __init__(self, simulation: Simulation, host: str) -> None:
        self._simulation, self.host = simulation, host
        self._since = simulation.now
        self.scheduler = Scheduler(simulation.rules, simulation.book.commit, simulation.now)
        self._well: set[str] = set()  # who has said that it ends well
        self._going: dict[str, set[str]] = {}  # by agent whose host is taken away: its processes
        self._wanted: dict[str, set[str]] = {}  # by agent
        self.lives, self.died = True, 0.0
        simulation.later(0.0, self._beat)

    def _beat(self) -> None:
        if self.lives:
            if self.scheduler.outcome is None:
                self._end_deaf()
            self._step()
            self._simulation.later(BEAT, self._beat)

    def _end_deaf(self) -> None:
        """An agent that is silent for too long is ended, and another one started on its host."""
        for node in list(self._simulation.nodes.values()):
            heard = max(node.since, self._since, self.scheduler.workers.last_heard(node.host))
            if node.lives and node.stopped and self._simulation.now > heard + RULES.deaf:
                node.die()
                self._simulation.add_node(node.host)

    def hear(self, status: Any) -> None:
        if self.lives:
            if status.draining:
                known = {rank.name for rank in status.workers}
                known |= self._wanted.get(status.agent, set())
                self._going.setdefault(status.agent, known)
            self._well |= {rank.name for rank in status.workers if rank.announced is End.WELL}
            self.scheduler.receive(status, self._simulation.now)
            self._step()

    def check_end(self) -> None:
        """A job has failed only if one of the last world was lost before it could say how it ends,
        or alone."""
        if self.scheduler.outcome == "":
            return
        assert self.scheduler.outcome == "a process was lost after others had succeeded"
        simulation = self._simulation
        names = simulation.book.record.world.members
        lost = [name for name in names if simulation.processes[name].was_killed]
        assert lost or not self._well.issuperset(names), "all had said that they end well"

    def _step(self) -> None:
        if self.scheduler.outcome is not None:
            return
        if self._simulation.leaves:
            self.scheduler.ending.leave()
        told = self.scheduler.step(self._simulation.now)
        self._simulation.book.note(self.scheduler._record)
        for name, wanted in told.items():
            node = self._simulation.nodes[name]
            self._wanted[name] = set(wanted.workers)
            more = self._wanted[name] - self._going.get(name, self._wanted[name])
            assert not more, f"{more} shall start on a host that is taken away"
            self._simulation.send(self.host, node.host, partial(node.hear, wanted))


class Simulation:
    """One job."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now, self._serial = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.book = Book(self)
        self.disk = Disk(self.random, self.book)
        self.processes: dict[str, Process] = {}
        self.nodes: dict[str, Node] = {}
        self._cut: set[tuple[str, str]] = set()
        self._fabrics: dict[int, Fabric] = {}
        self._loss = self.random.choice([0.0, 0.05, 0.3])
        self.leaves = False
        self.rules = replace(RULES, grows=self.random.random() < 0.5)
        for number in range(self.random.randint(1, 3)):
            self.add_node(f"h{number}")
        self.chief = Chief(self, self.random.choice(["h0", "h1", "x"]))
        for _ in range(self.random.randint(0, 12)):
            self.later(self.random.uniform(0, FAULTS_UNTIL), self._harm)
        self.later(FAULTS_UNTIL + 0.1, self._heal)

    # ---- time and network

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + seconds, self._serial, action))

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        random = self.random
        lossy = source != target and self.now < FAULTS_UNTIL
        if (source, target) in self._cut or (lossy and random.random() < self._loss):
            return
        for _ in range(1 + (lossy and random.random() < self._loss)):
            slow = lossy and random.random() < self._loss
            self.later(random.uniform(0, 4.0 if slow else 0.02), deliver)

    def fabric(self, world: World) -> Fabric:
        found = self._fabrics.setdefault(world.number, Fabric(self, world))
        assert found.world == world, f"there are two worlds {world.number}"
        return found

    def is_cut(self, host: str) -> bool:
        return any(host in pair for pair in self._cut)

    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.can_act()]

    # ---- harm

    def add_node(self, host: str) -> None:
        """Starts an agent, which first kills the ranks of the host's earlier one."""
        for node in self.nodes.values():
            if node.lives and node.host == host:
                node.die()
        name = f"{host}.{len(self.nodes)}"
        self.nodes[name] = Node(self, name, host)

    def lose(self, node: Node) -> None:
        """A host loses power for a time."""
        if node.lives:
            node.die()
            self.later(self.random.uniform(0, 20), lambda: self.add_node(node.host))

    def _harm(self) -> None:
        random, alive = self.random, self.alive()
        nodes = [node for node in self.nodes.values() if node.lives]
        what = random.randrange(11)
        if what < 3 and alive:
            for victim in random.sample(alive, min(len(alive), random.choice([1, 1, 2, 9]))):
                victim.end(End.LOST)
        elif what == 3 and alive:
            random.choice(alive).hangs = True
        elif what == 4:
            if nodes:
                self.lose(random.choice(nodes))
        elif what == 5:
            self.add_node(f"h{len(self.nodes)}")
        elif what == 6:
            self._kill_chief()
        elif what == 7:
            self._cut_off(nodes)
        elif what == 8:
            stays = [node for node in nodes if not (node.agent.draining or node.stopped)]
            if stays:
                random.choice(stays).go()
        elif what == 9 and nodes:
            random.choice(nodes).stopped = True
        elif random.random() < 0.1:
            self.leaves = True

    def _kill_chief(self) -> None:
        """Its agents end their ranks. The same command comes in time, or when all have ended."""
        if self.chief.lives:
            self.chief.lives, self.chief.died = False, self.now
            self.later(self.random.choice([self.random.uniform(0, 10), ENDED]), self._start_again)

    def _start_again(self) -> None:
        """The agents of the new supervisor kill those of the old one."""
        self.book.start_again()
        self._fabrics.clear()
        old = [node for node in self.nodes.values() if node.lives]
        for node in old:
            left = [process.name for process in node.processes if process.lives]
            orphaned = self.now > self.chief.died + ENDED - 1
            assert node.stopped or not (left and orphaned), f"{left} have outlived the supervisor"
            node.die()
        for host in {"h0", *(node.host for node in old if not node.agent.draining)}:
            self.add_node(host)
        self.chief = Chief(self, self.random.choice(["h0", "h1", "x"]))

    def _cut_off(self, nodes: list[Node]) -> None:
        hosts = sorted({node.host for node in nodes} | {self.chief.host})
        victim = self.random.choice(hosts)
        others = [host for host in hosts if host != victim]
        if self.random.random() < 0.5:
            others = [host for host in others if self.random.random() < 0.5]
        ways = self.random.choice([(True, True), (True, False), (False, True)])
        cut = {(victim, host) for host in others if ways[0]}
        cut |= {(host, victim) for host in others if ways[1]}
        self._cut |= cut
        self.later(LIMIT, lambda: self._break_fabrics(cut))
        self.later(self.random.uniform(0, 50), lambda: self._cut.difference_update(cut))

    def _break_fabrics(self, cut: set[tuple[str, str]]) -> None:
        """Ranks notice that others are cut off."""
        cut = cut & self._cut
        for fabric in list(self._fabrics.values()):
            members = [self.processes[name] for name in fabric.world.members]
            for process in members:
                if any((process.node.host, other.node.host) in cut for other in members):
                    fabric.leave(process.name, True)
                    fail = process.unless_it_goes_on(partial(process.fail, False))
                    self.later(self.random.uniform(0, 0.5), fail)

    def _heal(self) -> None:
        self._cut.clear()
        self.later(30.0, self._end_unnoticed)
        if not any(node.lives and not node.agent.draining for node in self.nodes.values()):
            self.add_node(f"h{len(self.nodes)}")

    def _end_unnoticed(self) -> None:
        """A world in which all hang looks like one that computes: a user has to end it."""
        for process in self.processes.values():
            if process.hangs:
                process.end(End.LOST)

    # ---- the run

    def run(self) -> None:
        """Runs the job to its end; raises AssertionError."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            assert self.now < LONGEST, "it does not end"
            action()
            chief = self.chief
            if chief.scheduler.outcome is not None and chief.lives and self.now > FAULTS_UNTIL + 1:
                chief.check_end()
                assert self.book.record.done or chief.scheduler.ending.leaves
                return


def main() -> None:
    first, number = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + number):
        try:
            Simulation(seed).run()
        except Exception as reason:
            raise SystemExit(f"seed {seed}: {type(reason).__name__}: {reason}") from reason
    print(f"seeds {first} to {first + number - 1}: every job has ended well")


if __name__ == "__main__":
    main()
