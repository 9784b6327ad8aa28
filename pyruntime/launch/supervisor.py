# SPDX-License-Identifier: Apache-2.0
"""The supervisor of `farandole run --elastic`: it starts the launcher, hears from every rank how it
ends, and starts all anew where another attempt may succeed. It runs on the main thread; other
threads put what happens into its queue."""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from farandole.errors import counted
from farandole.launch.attempt import Attempt, Ending, Event, Signal, say
from farandole.launch.commands import Launcher
from farandole.launch.job import Host, Job
from farandole.launch.roster import Blacklist, Roster, places, plan, ranks_on

PREEMPTED = 75  # the exit code if a signal ended the job before it had finished: start it again
_FAILED = 1
_TICK = 1.0  # seconds between looks at the hosts while there are too few
_ENDS = (signal.SIGINT, signal.SIGQUIT)  # the launcher, at once; the others ask ranks to leave
_SIGNALS = (*_ENDS, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Rules:
    """How a job is supervised."""

    least: int  # ranks
    most: int | None  # None: as many as there are slots
    script: str = ""  # which prints the hosts
    slots: int = 1  # of a host that the script prints without a number
    cooldown: tuple[float, float] = (10.0, 600.0)  # shortest and longest, in seconds
    restarts: int = 3  # that may follow each other without a commit
    patience: float = 600.0  # seconds to wait for hosts
    grace: float = 30.0  # seconds to leave in, after a signal
    folder: Path | None = None  # for commits; None: a new one, removed after success


def supervise(launcher: Launcher, job: Job, rules: Rules) -> int:
    """Runs the job to its end, whatever it takes; returns the exit code."""
    folder = rules.folder or Path(tempfile.mkdtemp(prefix="elastic-", dir=Path.cwd()))
    job = replace(
        job, environment={**job.environment, "FARANDOLE_CHECKPOINT_DIR": str(folder.absolute())}
    )
    with _signals() as events, Roster(job.hosts, rules.script, rules.slots, say) as roster:
        code = _Supervisor(launcher, job, rules, events, roster).run()
    kept = folder.is_dir() and any(folder.iterdir())
    if rules.folder is None and (code == 0 or not kept):
        shutil.rmtree(folder, ignore_errors=True)
    elif code != 0 and kept:
        say(f"the commits are in {folder}: --checkpoint-dir {folder} goes on from there")
    return code


class _Supervisor:
    """The loop over attempts."""

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        rules: Rules,
        events: SimpleQueue[Event],
        roster: Roster,
    ) -> None:
        self._launcher, self._job, self._rules = launcher, job, rules
        self._events, self._roster = events, roster
        self._blacklist = Blacklist(*rules.cooldown)
        self._stopped = 0  # the signal that ends the job

    def run(self) -> int:
        """Returns the exit code."""
        starts, idle = 0, 0  # idle: attempts without a commit since the last one with any
        while True:
            hosts = self._wait_for_hosts()
            if hosts is None:
                return self._code_of_stop()
            starts += 1
            try:
                self._launcher.command(self._job_on(hosts))
            except ValueError as reason:  # srun takes no hosts with different numbers of slots, say
                say(str(reason))
                return _FAILED
            ending, attempt = self._attempt(starts, hosts)
            if ending is Ending.FINISHED:
                say(f"the job has finished after {counted(starts - 1, 'restart')}")
                return 0
            if self._stopped:
                return self._code_of_stop()
            if ending is Ending.PROGRAM:
                say("it is not tried again: this is the program's own doing")
                return attempt.code if 0 < attempt.code < 128 else _FAILED
            idle = 0 if attempt.commits else idle + 1
            if idle > self._rules.restarts:
                say(f"{counted(idle, 'start')} without a commit: that is enough (--restarts)")
                return _FAILED
            self._leave_out(attempt)

    def _job_on(self, hosts: tuple[Host, ...]) -> Job:
        return replace(self._job, hosts=hosts, ranks=ranks_on(hosts)) if hosts else self._job

    def _attempt(self, number: int, hosts: tuple[Host, ...]) -> tuple[Ending, Attempt]:
        job = self._job_on(hosts)
        where = f": {places(hosts)}" if hosts else ""
        say(f"start {number}: {counted(job.ranks, 'rank')}{where}")
        attempt = Attempt(self._launcher, job, self._events)
        with attempt:
            while attempt.goes_on():
                event = attempt.next_event()
                if isinstance(event, Signal):
                    self._stop(event, attempt)
                elif not self._stopped and hosts and self._should_move(hosts):
                    attempt.ask_to_leave("the hosts change: all ranks leave at their next commit")
        ending, story = attempt.judge()
        if story:
            say(story)
        return ending, attempt

    # ---- hosts

    def _wait_for_hosts(self) -> tuple[Host, ...] | None:
        """The hosts of the next attempt; () leaves them to the launcher. None: it ends here."""
        while not self._events.empty():
            self._take(self._events.get())
        if not self._roster.hosts and not self._roster.scripted:
            return None if self._stopped else ()
        deadline = time.monotonic() + self._rules.patience
        told = False
        while not self._stopped:
            if hosts := self._plan():
                return hosts
            known = self._roster.hosts
            if time.monotonic() > deadline:
                say(
                    f"{self._rules.patience:g} s (--elastic-timeout) without hosts for "
                    f"{counted(self._rules.least, 'rank')} (--min-np); known: "
                    f"{places(known) or 'none'}"
                )
                return None
            if not told:
                out = [host.name for host in known if self._blacklist.has(host.name)]
                but = f"; left out for a time: {', '.join(out)}" if out else ""
                least = counted(self._rules.least, "rank")
                say(f"waits for hosts for {least}; known: {places(known) or 'none'}{but}")
                told = True
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=_TICK))
        return None

    def _plan(self) -> tuple[Host, ...]:
        return plan(self._roster.hosts, self._blacklist, self._rules.least, self._rules.most)

    def _should_move(self, now: tuple[Host, ...]) -> bool:
        """Whether the script has changed what the job should run on."""
        if not self._roster.scripted:
            return False
        free = {host.name: host.slots for host in self._roster.hosts}
        gone = any(free.get(host.name, 0) < host.slots for host in now)
        return gone or ranks_on(self._plan()) > ranks_on(now)

    def _leave_out(self, attempt: Attempt) -> None:
        """Puts hosts on the blacklist, if there are others."""
        if len(self._roster.hosts) < 2:
            return
        names = attempt.suspects() or (
            # Nothing has started: a host that failed before may still be down.
            self._blacklist.known() & {host.name for host in attempt.job.hosts}
            if not attempt.came
            else set()
        )
        for name in sorted(names):
            say(f"{name} is left out for {self._blacklist.add(name):g} s")

    # ---- signals

    def _take(self, event: Event) -> None:
        if isinstance(event, Signal):
            self._stopped = event.number

    def _stop(self, event: Signal, attempt: Attempt) -> None:
        name = signal.Signals(event.number).name
        if self._stopped or event.number in _ENDS:
            attempt.end_launcher(f"{name}: the job is ended")
        else:
            within = f"within {self._rules.grace:g} s (FARANDOLE_GRACE)"
            attempt.ask_to_leave(f"{name}: all ranks leave at their next commit, {within}")
            attempt.limit(self._rules.grace)
        self._stopped = event.number

    def _code_of_stop(self) -> int:
        if self._stopped in _ENDS:
            return 128 + self._stopped
        return PREEMPTED if self._stopped else _FAILED


@contextlib.contextmanager
def _signals() -> Iterator[SimpleQueue[Event]]:
    """The queue of events, into which signals go too while the context lasts."""
    events: SimpleQueue[Event] = SimpleQueue()
    before = {
        number: signal.signal(number, lambda n, _: events.put(Signal(n)))
        for number in _SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup's
    }
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
