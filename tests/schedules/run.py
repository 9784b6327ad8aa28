# SPDX-License-Identifier: Apache-2.0
"""Runs the job of a schedule, and does to it what the schedule says."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from harness.process import SLOWNESS
from harness.wire import Weather
from schedules.job import POLL, Job
from schedules.outcome import Listener, Outcome
from schedules.schedule import AGENT, BEGIN, HOST, LAUNCHER, SUPERVISOR, Act, Fault, Schedule

__all__ = ["run"]

_SIGNALS = {
    Act.KILL: signal.SIGKILL,
    Act.STOP: signal.SIGSTOP,
    Act.HANG: signal.SIGUSR2,
    Act.TERM: signal.SIGTERM,
}
_PATIENCE = 60.0 * SLOWNESS  # seconds without anything that a rank tells, or that happens


class _Injector:
    """Does to a running job what the schedule says, until the job ends or hangs."""

    def __init__(self, schedule: Schedule, job: Job, folder: Path, outcome: Outcome) -> None:
        self._schedule, self._job, self._folder = schedule, job, folder
        self._outcome = outcome
        self._faults = list(schedule.faults)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._healed = False

    def go(self, changed: threading.Condition) -> None:
        """Returns when the job has ended; sets `hung` if it does not."""
        outcome = self._outcome
        outcome.last = time.monotonic()
        while self._due or not self._job.ended():
            self._expect()
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
                self._expect()
            latest = max([outcome.last, *(told.at for told in outcome.told[-1:])])
            if time.monotonic() > latest + _PATIENCE:
                outcome.hung = self._job.stacks() or "no stacks"
                return
            self._help()
            with changed:
                wait = self._due[0][0] - time.monotonic() if self._due else POLL
                if wait > 0:
                    changed.wait(min(wait, POLL))

    def _at(self, at: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at, self._serial, action))

    def _expect(self) -> None:
        """The next fault waits for its moment; only then the one after it."""
        if not self._faults:
            return
        fault = self._faults[0]
        rank = fault.whom if isinstance(fault.whom, int) else 0
        told = self._outcome.of(rank, "begin", "step")
        if self._schedule.kind.elastic and fault.step != BEGIN:  # the rank may wait to join
            told = self._outcome.told
        if not any(
            each.what == "begin" if fault.step == BEGIN else each.words.get("step") == fault.step
            for each in told
        ):
            return
        self._faults.pop(0)
        if fault.free:
            self._let_go(fault.step)
        self._at(time.monotonic() + fault.after, lambda: self._inject(fault))

    def _let_go(self, step: int) -> None:
        """The ranks may go on from this step, unless more is to happen there."""
        if all(fault.step != step for fault in self._faults):
            (self._folder / f"past-{step}").touch()

    def _note(self, text: str) -> None:
        self._outcome.last = time.monotonic()
        self._outcome.happened.append((self._outcome.last, text))

    def _inject(self, fault: Fault) -> None:
        if fault.act is Act.WEATHER:
            self._set(fault.weather, str(fault))
            if fault.lasts is not None:
                self._at(time.monotonic() + fault.lasts, lambda: self._set(Weather(), "fair again"))
        elif fault.whom == HOST:
            hosts = self._job.hosts
            assert hosts is not None
            hosts.cut_power(1)
            self._note(str(fault))
            self._at(time.monotonic() + (fault.lasts or 0.0), self._plug_in)
        elif pid := self._pid(fault.whom):
            number = _SIGNALS[fault.act]
            arrived = self._signal(pid, number, f"{fault} ({pid})")
            if arrived and fault.ends_ranks:
                self._outcome.victims.add(pid)
            if fault.lasts is not None and fault.act is Act.KILL:
                if arrived:  # else the next supervisor is on its way already, and only one may run
                    self._at(time.monotonic() + fault.lasts, self._start_next)
            elif fault.lasts is not None:
                self._at(time.monotonic() + fault.lasts, lambda: self._go_on(pid, fault))
        else:
            self._note(f"not there any more: {fault}")
        self._let_go(fault.step)

    def _plug_in(self) -> None:
        assert self._job.hosts is not None
        self._job.hosts.set_link(1, up=True)
        self._note("the host has power again")

    def _start_next(self) -> None:
        self._job.start()
        self._note("the next supervisor starts")

    def _set(self, weather: Weather, text: str) -> None:
        assert self._job.hosts is not None
        counts = self._job.hosts.weather(weather)
        self._note(f"{text} ({counts})")

    def _pid(self, whom: int | str) -> int | None:
        if whom == AGENT:
            return self._job.agent()
        if whom in (LAUNCHER, SUPERVISOR):
            return self._job.processes[-1].pid
        assert isinstance(whom, int)
        return self._outcome.of(whom, "begin")[-1].pid

    def _go_on(self, pid: int, fault: Fault) -> None:
        self._signal(pid, signal.SIGCONT, f"{fault.whom} goes on ({pid})")

    def _signal(self, pid: int, number: int, text: str) -> bool:
        """Only a process of this job: numbers are used again."""
        if str(self._folder) in _command(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self._note(text)
                return True
        self._note(f"gone before: {text}")
        return False

    def _help(self) -> None:
        """A person repairs a link when all have ended, and then ends those that hang."""
        if self._due:
            return
        outcome = self._outcome
        begun = {told.pid for told in outcome.told}
        if self._schedule.kind.elastic:
            # A rank may work for hours after its last step, or alone in its world, and nobody else
            # can tell that it hangs: only a person knows.
            last_words = {told.pid: told.what for told in outcome.told}
            others = {pid for pid in begun - outcome.victims if _command(pid)}
            victims = {pid for pid in outcome.victims if _command(pid)}
            finished = "done" in last_words.values() and all(
                last_words[pid] in ("done", "end") for pid in others
            )
            alone = all(last_words[pid] == "begin" for pid in others) and all(
                last_words.get(pid) == "step" for pid in victims
            )
            if victims and (finished or (alone and others)):
                self.end_victims("all others have finished, or wait to join")
            return
        last = [outcome.of(rank, "end", "error") for rank in range(self._schedule.ranks)]
        if all(last) and self._job.hosts and not self._healed:
            self._healed = True
            self._set(Weather(), "all have said how they end: MPI's own end gets a fair wire")
        # Whoever has said its last word may wait in MPI's own end for one that is stopped.
        ended = {told.pid for told in outcome.told if told.what == "end"}
        if not any(_command(pid) for pid in begun - outcome.victims - ended):
            self.end_victims()

    def end_victims(self, why: str = "all others have ended") -> None:
        """Ends what hangs, when all others have ended."""
        for pid in self._outcome.victims:
            if str(self._folder) in _command(pid):
                self._signal(pid, signal.SIGKILL, f"{why}: {pid} is ended")


def _command(pid: int) -> str:
    """Of a living process; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def run(schedule: Schedule) -> Outcome:
    """What came of the schedule's job."""
    outcome = Outcome()
    with ExitStack() as stack:
        # The name of a Unix socket has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sch")))
        listener = Listener(folder / "line", outcome)
        stack.callback(listener.close)
        job = Job(schedule, folder, stack)
        injector = _Injector(schedule, job, folder, outcome)
        job.start()
        injector.go(listener.changed)
        for process in job.processes:
            process.wait(0)  # reads the last output of one that has ended
        outcome.out = job.output()
        outcome.code = job.processes[-1].returncode
        outcome.left = "" if outcome.hung else job.left()
    return outcome
