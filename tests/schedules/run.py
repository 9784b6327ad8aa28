# SPDX-License-Identifier: Apache-2.0
"""Runs the job of a schedule, does to it what the schedule says, and collects what came of it."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.start.rendezvous import RendezvousServer
from harness.hosts import SimulatedHosts, simulated_hosts
from harness.mpirun import MPI_ENVIRONMENT, find_mpirun
from harness.proc import our_shared_memory, processes_of_sessions, python_stacks
from harness.process import SLOWNESS, JobError, Process, wait_until_gone
from harness.supervised import farandole_run
from harness.wire import Weather, pids_in
from harness.worlds import ULFM
from schedules.schedule import BEGIN, LAUNCHER, SUPERVISOR, Act, Fault, Kind, Schedule
from schedules.training import STEPS

__all__ = ["LIMITS", "Outcome", "Told", "run"]

PROGRAM = Path(__file__).with_name("program.py")
# A stop that passes is shorter than any of these, whatever else the machine does.
LIMITS = {
    "FARANDOLE_STALL_WARN": "1",
    "FARANDOLE_STALL_ABORT": "4",
    "FARANDOLE_PEER_TIMEOUT": "5",
    "FARANDOLE_INIT_TIMEOUT": "8",
}
_ENDS = {"FARANDOLE_SHUTDOWN_TIMEOUT": "6"}  # a day, where a supervisor must see to it
_PATIENCE = 60.0 * SLOWNESS  # seconds without anything that a rank tells, or that happens
_POLL = 0.02  # seconds between looks at processes, whose ends are no events


@dataclass(frozen=True)
class Told:
    """What a rank has told; `pid` is from the kernel."""

    at: float
    pid: int
    rank: int
    what: str  # begin, step, done, end, error
    words: dict[str, Any]


@dataclass
class Outcome:
    """What came of a job."""

    told: list[Told] = field(default_factory=list)
    happened: list[tuple[float, str]] = field(default_factory=list)
    victims: set[int] = field(default_factory=set)  # processes that were killed, stopped, hang
    hung: str = ""  # stacks, if it had not ended in time
    left: str = ""  # what it has left behind
    code: int | None = None  # of the launcher or supervisor; None: it was killed
    out: str = ""
    last: float = 0.0  # when the last fault began or ended

    def of(self, rank: int, *whats: str) -> list[Told]:
        """What a rank has told of these kinds."""
        return [told for told in self.told if told.rank == rank and told.what in whats]

    def story(self) -> str:
        """All of it, in order."""
        start = min([at for at, _ in self.happened] + [told.at for told in self.told], default=0.0)
        lines = [(at, text) for at, text in self.happened]
        for told in self.told:
            words = {name: word for name, word in told.words.items() if name != "seen"}
            lines.append((told.at, f"rank {told.rank} ({told.pid}): {told.what} {words}"))
        return "\n".join(f"{at - start:8.3f} s  {text}" for at, text in sorted(lines))


class _Listener:
    """Hears what ranks tell; `changed` is notified each time."""

    def __init__(self, path: Path, outcome: Outcome) -> None:
        self.changed = threading.Condition()
        self._outcome = outcome
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, extra, _, _ = self._socket.recvmsg(1 << 16, 256)
            if not data:
                return
            pid = next(struct.unpack("=iII", x)[0] for _, kind, x in extra if kind == 2)
            words = json.loads(data)
            told = Told(time.monotonic(), pid, words.pop("rank"), words.pop("what"), words)
            with self.changed:
                self._outcome.told.append(told)
                self.changed.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


class _Job:
    """The processes of a schedule's job, all dead when the stack is closed."""

    def __init__(self, schedule: Schedule, folder: Path, stack: ExitStack) -> None:
        kind = schedule.kind
        self.kind = kind
        self.hosts: SimulatedHosts | None = None
        if kind.wired:
            made = simulated_hosts(folder, schedule.hosts, schedule.seed)
            self.hosts = stack.enter_context(made)
        self._folder, self._ranks = folder, schedule.ranks
        plan = {
            "folder": str(folder),
            "elements": schedule.elements,
            "holds": sorted({fault.step for fault in schedule.faults}),
            "elastic": kind.elastic,
        }
        self._argv = [sys.executable, str(PROGRAM), json.dumps(plan)]
        self._server: RendezvousServer | None = None
        if kind is Kind.FORK:
            self._server = RendezvousServer(schedule.ranks)
            stack.callback(self._server.close)
        self._stack = stack
        self.processes: list[Process] = []

    def start(self) -> None:
        """Starts it, or starts it anew."""
        environment = {**MPI_ENVIRONMENT, **LIMITS, "PYTHONPATH": str(PROGRAM.parents[1])}
        environment |= {} if self.kind.supervised else _ENDS
        environment |= self.hosts.environment() if self.hosts else {}
        for number, (command, own) in enumerate(self._commands()):
            process = Process(command, {**environment, **own})
            self._stack.callback(process.kill)
            self.processes[number : number + 1] = [process]

    def _commands(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Commands, each with variables of its own."""
        places = self.hosts.mpi_args() if self.hosts else []
        np = ["-np", str(self._ranks)]
        if self._server is not None:
            for rank in range(self._ranks):
                yield self._argv, self._server.environment(rank)
        elif self.kind.supervised:
            words = [*np, "--checkpoint-dir", str(self._folder), "--restarts", "10"]
            if self.hosts:
                agent = " ".join(places[:3])
                words += ["--mpi-args", agent, "-H", places[-1]]
                words += ["--blacklist-cooldown-range", "0", "0"]
            yield farandole_run(words, self._argv), {}
        else:
            ulfm = list(ULFM) if self.kind is Kind.WORLDS else []
            if self.kind is Kind.HOSTS:
                ulfm = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
            yield [find_mpirun(), *ulfm, *places, *np, *self._argv], {}

    @property
    def sessions(self) -> set[int]:
        """Of all its processes on this host."""
        return {process.pid for process in self.processes}

    def ended(self) -> bool:
        """Whether what was started here has ended, not what that has started."""
        return all(process.returncode is not None for process in self.processes)

    def launcher(self) -> int | None:
        """The process that started the ranks; None: there is none now."""
        own = self.processes[0].pid
        if not self.kind.supervised:
            return own
        for process in processes_of_sessions(self.sessions):
            with contextlib.suppress(OSError):  # it may end while we look
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == own and "mpirun" in process.command:
                    return process.pid
        return None

    def output(self) -> str:
        """Of all processes."""
        return "\n".join(process.output for process in self.processes)

    def stacks(self) -> str:
        """Of all Python processes, wherever they are."""
        return python_stacks(processes_of_sessions(self.sessions))

    def left(self) -> str:
        """What is left when it has ended; waits for what is about to end."""
        try:
            wait_until_gone(self.sessions)
        except JobError as error:
            return str(error)
        remaining = {}
        for name in self.hosts.names if self.hosts else ():
            deadline = time.monotonic() + 30 * SLOWNESS
            while (remaining := {name: pids_in(name)})[name] and time.monotonic() < deadline:
                time.sleep(_POLL)  # they are not our children: no event says that they end
            if remaining[name]:
                return f"processes left on {remaining}"
        return f"left in /dev/shm: {files}" if (files := our_shared_memory()) else ""


class _Injector:
    """Does to a running job what the schedule says, until the job ends or hangs."""

    def __init__(self, schedule: Schedule, job: _Job, folder: Path, outcome: Outcome) -> None:
        self._schedule, self._job, self._folder = schedule, job, folder
        self._outcome = outcome
        self._faults = list(schedule.faults)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._weather = Weather()

    def go(self, changed: threading.Condition) -> None:
        """Returns when the job has ended; sets `hung` if it does not."""
        outcome = self._outcome
        outcome.last = time.monotonic()
        while not self._job.ended():
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
                wait = self._due[0][0] - time.monotonic() if self._due else _POLL
                if wait > 0:
                    changed.wait(min(wait, _POLL))

    def _at(self, at: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._due, (at, self._serial, action))

    def _expect(self) -> None:
        """The next fault waits for its moment; only then the one after it."""
        if not self._faults:
            return
        fault = self._faults[0]
        rank = fault.whom if isinstance(fault.whom, int) else 0
        if not any(
            told.what == "begin" if fault.step == BEGIN else told.words.get("step") == fault.step
            for told in self._outcome.of(rank, "begin", "step")
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

    def let_all_go(self) -> None:
        """A later start of the job waits for nothing."""
        for step in range(STEPS + 1):
            (self._folder / f"past-{step}").touch()

    def _note(self, text: str) -> None:
        self._outcome.last = time.monotonic()
        self._outcome.happened.append((self._outcome.last, text))

    def _inject(self, fault: Fault) -> None:
        if fault.act is Act.WEATHER:
            self._set(fault.weather, str(fault))
            if fault.lasts is not None:
                self._at(time.monotonic() + fault.lasts, lambda: self._set(Weather(), "fair again"))
        elif pid := self._pid(fault.whom):
            number = {Act.KILL: signal.SIGKILL, Act.STOP: signal.SIGSTOP, Act.HANG: signal.SIGUSR2}
            if self._signal(pid, number[fault.act], f"{fault} ({pid})") and fault.ends_ranks:
                self._outcome.victims.add(pid)
            if fault.lasts is not None:
                self._at(time.monotonic() + fault.lasts, lambda: self._go_on(pid, fault))
        else:
            self._note(f"not there any more: {fault}")
        self._let_go(fault.step)

    def _set(self, weather: Weather, text: str) -> None:
        assert self._job.hosts is not None
        counts = self._job.hosts.weather(weather)
        self._note(f"{text} ({counts})")

    def _pid(self, whom: int | str) -> int | None:
        if whom == LAUNCHER:
            return self._job.launcher()
        if whom == SUPERVISOR:
            return self._job.processes[0].pid
        assert isinstance(whom, int)
        return self._outcome.of(whom, "begin")[-1].pid

    def _go_on(self, pid: int, fault: Fault) -> None:
        self._signal(pid, signal.SIGCONT, f"{fault.whom} goes on ({pid})")

    def _signal(self, pid: int, number: int, text: str) -> bool:
        """Only a process of this job: numbers are used again."""
        ours = str(self._folder) in _command(pid) or pid in (
            self._job.launcher(),
            *self._job.sessions,
        )
        if ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self._note(text)
                return True
        self._note(f"gone before: {text}")
        return False

    def _help(self) -> None:
        """Where nobody else does it, and all others have ended, a person ends those that hang."""
        if self._schedule.kind.supervised or self._due:
            return
        begun = {told.pid for told in self._outcome.told}
        if {pid for pid in begun - self._outcome.victims if _command(pid)}:
            return
        for pid in self._outcome.victims & begun:
            if str(self._folder) in _command(pid):
                self._signal(pid, signal.SIGKILL, f"all others have ended: {pid} is ended")


def _command(pid: int) -> str:
    """Of a living process; empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def run(schedule: Schedule) -> Outcome:
    """What came of the schedule's job; one whose supervisor was killed is started once more."""
    outcome = Outcome()
    with ExitStack() as stack:
        # The name of a Unix socket has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sch")))
        listener = _Listener(folder / "line", outcome)
        stack.callback(listener.close)
        job = _Job(schedule, folder, stack)
        injector = _Injector(schedule, job, folder, outcome)
        starts = 1 + any(f.whom == SUPERVISOR and f.act is Act.KILL for f in schedule.faults)
        for start in range(starts):
            outcome.happened.append((time.monotonic(), f"start {start + 1} of {starts}"))
            job.start()
            injector.go(listener.changed)
            outcome.out += job.output()
            outcome.code = job.processes[0].returncode
            outcome.left = "" if outcome.hung else job.left()
            if outcome.hung or outcome.left:
                break
            injector.let_all_go()
    return outcome
