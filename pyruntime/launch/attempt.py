# SPDX-License-Identifier: Apache-2.0
"""One start of a supervised job: the launcher, what its ranks say, and how it has ended. For the
supervisor, on its thread; one thread waits for the launcher and one hears the ranks."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from queue import SimpleQueue
from typing import NamedTuple

from farandole.config import setting
from farandole.errors import counted, ranks_text
from farandole.launch.commands import Launcher
from farandole.launch.door import Door
from farandole.launch.job import Job, outer_environment
from farandole.launch.processes import LocalProcesses
from farandole.start.server import Guest
from farandole.start.supervised import ADDRESS, KEY, LEAVE, Said, What, Whereabouts

_TICK = 1.0  # seconds; after each the supervisor looks at the hosts
_LINGER = 10.0  # seconds for a launcher to end when all ranks have, one has failed, or by SIGTERM
_LAST_WORDS = 5.0  # seconds for those of ranks, when the launcher has ended
_EXIT = 1.0  # seconds for ranks to be gone then


class Signal(NamedTuple):
    """The supervisor got it."""

    number: int


class Word(NamedTuple):
    """What a rank has said; None: its connection has ended."""

    line: Door  # of which attempt
    rank: int
    said: Said | None


class Ended(NamedTuple):
    """The launcher has ended."""

    line: Door  # of which attempt
    code: int


Event = Signal | Word | Ended


class Ending(Enum):
    """How an attempt has ended."""

    FINISHED = 1  # every rank's program has ended well
    LEFT = 2  # the ranks were asked to leave, and their state is on the disk
    PROGRAM = 3  # by the program's own doing: another attempt would end in the same way
    BROKEN = 4  # another attempt may succeed


@dataclass
class _Rank:
    host: str = ""
    last: Said | None = None  # how it ends, as it says
    signalled: bool = False  # by whoever takes its host away, or by a launcher that ends the job
    gone: float = float("inf")  # when its connection ended

    def failed(self) -> bool:
        """Whether it has said so."""
        return self.last is not None and self.last.what in (What.FAILED, What.BROKEN)


class _Line(Door):
    """Where the ranks call."""

    def __init__(self, ranks: int, here: bool, events: SimpleQueue[Event]) -> None:
        self._events = events
        self._leaving = False
        super().__init__(ranks, here)

    def ask_to_leave(self) -> None:
        """Asks all ranks, those that come later too."""

        def ask() -> None:
            self._leaving = True
            for guest in list(self._guests):
                self._send(guest, LEAVE)

        self.soon(ask)

    def _came(self, guest: Guest) -> None:
        _notice_lost_hosts(guest.connection)
        if self._leaving:
            self._send(guest, LEAVE)

    def _heard(self, guest: Guest, message: bytes) -> None:
        self._events.put(Word(self, guest.rank, Said.decode(message)))

    def _gone(self, guest: Guest) -> None:
        self._events.put(Word(self, guest.rank, None))


def _notice_lost_hosts(connection: socket.socket) -> None:
    """Makes the connection end if the other host is silent for FARANDOLE_PEER_TIMEOUT."""
    seconds = max(4, int(float(setting("FARANDOLE_PEER_TIMEOUT"))))
    options = {socket.TCP_KEEPIDLE: seconds // 2, socket.TCP_KEEPINTVL: seconds // 4}
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {**options, socket.TCP_KEEPCNT: 2}.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Attempt:
    """A context manager, in which the launcher runs."""

    def __init__(self, launcher: Launcher, job: Job, events: SimpleQueue[Event]) -> None:
        self._events = events
        self._line = _Line(job.ranks, job.here, events)
        ours = {ADDRESS: self._line.address, KEY: self._line.key}
        self.job = replace(job, environment={**job.environment, **ours})
        self._command = launcher.command(self.job)
        self._ranks: dict[int, _Rank] = {}
        self._here = LocalProcesses()
        self._asked = False
        self._deadline = float("inf")  # then the launcher is ended
        self._why = ""  # with that deadline
        self._terminated = False
        self._longest_stop = _longest_stop(job)
        self._looked = time.monotonic()
        self.commits = 0
        self.code: int = 0  # the launcher's
        self._ended = False

    def __enter__(self) -> Attempt:
        self._line.__enter__()
        self._process = subprocess.Popen(
            self._command,
            env=outer_environment(self.job),
            stdin=subprocess.DEVNULL,
            preexec_fn=os.setpgrp,  # what Ctrl-C or timeout(1) signals is the supervisor alone
        )
        self._here.add_child("the launcher", self._process.pid)
        threading.Thread(target=self._wait, name="launcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:  # after an exception
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LINGER)
            self._process.kill()
        killed = self._process.wait() < 0
        self._hear_last_words(0.0 if killed else _LAST_WORDS)
        self._end_orphans()
        self._line.__exit__()

    def _hear_last_words(self, seconds: float) -> None:
        """Waits until no rank is connected, so many seconds at most."""
        until = time.monotonic() + seconds
        later = []
        while self._awaited() and time.monotonic() < until:
            event = self._take(until - time.monotonic())
            later += [event] if isinstance(event, Signal) else []
        for signal in later:
            self._events.put(signal)

    def _end_orphans(self) -> None:
        """Ends ranks that outlive their launcher, and would commit beside the next attempt's."""
        if orphans := self._here.outliving(_EXIT):
            say(f"{', '.join(orphans)} outlived the launcher: killed")
        self._here.kill()
        self._line.ask_to_leave()  # those on other hosts, which can't be killed from here
        self._hear_last_words(_LAST_WORDS)
        if self._awaited():
            left = [n for n, rank in self._ranks.items() if rank.gone == float("inf")]
            say(f"{ranks_text(left)} may still run on another host, which does not answer")

    def _wait(self) -> None:
        self._events.put(Ended(self._line, self._process.wait()))

    @property
    def came(self) -> bool:
        """Whether any rank has called."""
        return bool(self._ranks)

    def goes_on(self) -> bool:
        """Whether the launcher still runs."""
        return not self._ended

    def next_event(self) -> Event | None:
        """The next event, noted; None after a second without one."""
        event = self._take(_TICK)
        if not self._ended and time.monotonic() > self._deadline:
            if self._terminated:
                self._process.kill()
            self.end_launcher(f"{self._why}the launcher has not ended by itself: it is ended")
        if not self._ended and time.monotonic() > self._looked + _TICK:
            self._looked = time.monotonic()
            self._look_for_stopped()
        return event

    def _look_for_stopped(self) -> None:
        """Ends the launcher if a process here is stopped for as long as others wait for a rank."""
        if name := self._here.stopped(self._longest_stop):
            seconds = f"{self._longest_stop:g} s (FARANDOLE_STALL_ABORT)"
            self.end_launcher(f"{name} has been stopped for {seconds}: the launcher is ended")

    def _take(self, seconds: float) -> Event | None:
        try:
            event = self._events.get(timeout=max(0.0, min(seconds, _TICK)))
        except queue.Empty:
            return None
        if isinstance(event, Signal) or event.line is not self._line:
            return event
        if isinstance(event, Ended):
            self.code, self._ended = event.code, True
        else:
            if event.said is not None and event.said.what is What.HERE:
                self._here.add(f"rank {event.rank}", Whereabouts.parse(event.said.text))
            self._note(self._ranks.setdefault(event.rank, _Rank()), event.said)
        return event

    def _note(self, rank: _Rank, said: Said | None) -> None:
        if said is None:
            rank.gone = time.monotonic()
            if len(self._ranks) >= self.job.ranks and not self._awaited() and not self._all_done():
                self.limit(_LINGER)
        elif said.what is What.HERE:  # each of several programs in turn is a rank
            rank.host = Whereabouts.parse(said.text).host
            rank.last, rank.gone = None, float("inf")
            failed = any(other.failed() for other in self._ranks.values())
            if not (self._asked or self._terminated or failed):
                self._deadline = float("inf")  # what the one before it had said is over
        elif said.what is What.COMMITTED:
            self.commits += 1
        elif said.what is What.SIGNALLED:
            rank.signalled = True
        elif said.what is What.FAILED and self._terminated:  # because of that, perhaps
            rank.last = Said(What.BROKEN, said.text)
        else:
            rank.last = said
            if rank.failed() and not self.job.ulfm:  # the others can't go on without it
                self._why = self._why or f"a rank failed ({said.text}), but others go on or hang; "
                self.limit(_LINGER)

    def _awaited(self) -> bool:
        """Whether ranks are still connected."""
        return any(rank.gone == float("inf") for rank in self._ranks.values())

    def _all_done(self) -> bool:
        """Whether all that came have ended well."""
        lasts = [rank.last for rank in self._ranks.values()]
        return all(last is not None and last.what is What.DONE for last in lasts)

    def limit(self, seconds: float) -> None:
        """Ends the launcher if it still runs after so many seconds."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def ask_to_leave(self, why: str) -> None:
        """Asks all ranks to commit and leave."""
        if not self._asked:
            self._asked = True
            say(why)
            self._line.ask_to_leave()

    def end_launcher(self, why: str) -> None:
        """Ends it by SIGTERM, with which MPI's launchers end their ranks, once; SIGKILL, after
        which ranks may live on, comes only later."""
        if not self._terminated:
            say(why)
            self._process.terminate()
            self._terminated = True
            self._deadline = time.monotonic() + _LINGER

    # ---- afterwards

    def judge(self) -> tuple[Ending, str]:
        """How it has ended, and that in a sentence."""
        lasts = {n: rank.last for n, rank in sorted(self._ranks.items()) if rank.last is not None}
        what = {said.what for said in lasts.values()}
        after = f"after {counted(self.commits, 'commit')}"
        if self._launcher_was_killed():
            return Ending.BROKEN, f"the launcher was killed by signal {-self.code} {after}"
        for n, said in lasts.items():
            if said.what is What.FAILED:
                return Ending.PROGRAM, f"rank {n} failed {after}: {said.text}"
        if not self._ranks:
            text = f"the launcher ended with {self.code} before any rank had called init()"
            if self.job.here and self.code == 0:  # the program has found nothing to do
                return Ending.FINISHED, text
            own = self.job.here and 0 <= self.code < 128  # else a host may be down
            return Ending.PROGRAM if own else Ending.BROKEN, text
        all_ = len(lasts) == len(self._numbers())
        if what == {What.DONE} and (all_ or self.job.ulfm):
            if self.code <= 0 or self._terminated:  # by the supervisor: the code is its doing
                return Ending.FINISHED, ""
            text = f"all ranks ended well, but the launcher with {self.code}"
            return Ending.PROGRAM, f"{text}: an exit code that the program chose"
        if all_ and what <= {What.DONE, What.LEFT}:
            return Ending.LEFT, f"all ranks left {after}, and their state is on the disk"
        lost = self._lost()
        if lost:
            n = lost[0]
            host = f" on {self._ranks[n].host}" if n in self._ranks else ""
            more = f", then {len(lost) - 1} more" if len(lost) > 1 else ""
            text = f"rank {n}{host} ended without a word {after}{more}; the launcher's exit code "
            return Ending.BROKEN, f"{text}is {self.code}"
        n, said = next((n, said) for n, said in lasts.items() if said.what is What.BROKEN)
        early = [n for n, said in lasts.items() if said.what is What.DONE]
        if early:
            text = f"rank {early[0]} had ended well, but rank {n} failed: {said.text}"
            return Ending.PROGRAM, text
        return Ending.BROKEN, f"rank {n} failed {after}: {said.text}"

    def _launcher_was_killed(self) -> bool:
        """Whether others than this process have killed it, before all ranks had ended well."""
        return self.code < 0 and not self._terminated and not self._all_done()

    def _lost(self) -> list[int]:
        """Ranks that ended, or were cut off, without a word.

        Those come first whose end even the launcher's did not show: their host is cut off. Others
        come in the order of their ends; last those that the launcher has ended by a signal.
        """
        silent = [n for n in self._numbers() if self._of(n).last is None]
        return sorted(silent, key=self._how_late)

    def _numbers(self) -> range:
        """All ranks; `a.py : -np 2 b.py` starts more than the job knows of."""
        return range(max([self.job.ranks, *(n + 1 for n in self._ranks)]))

    def _how_late(self, rank: int) -> tuple[bool, float, int]:
        gone = self._of(rank).gone
        cut_off = rank in self._ranks and gone == float("inf")
        return self._of(rank).signalled, 0.0 if cut_off else gone, rank

    def _of(self, rank: int) -> _Rank:
        return self._ranks.get(rank, _Rank())

    def suspects(self) -> set[str]:
        """The hosts, as the job names them, where it broke, or whose ranks left after a signal."""
        lost = [] if self._launcher_was_killed() else self._lost()[:1]  # whose host did nothing
        ranks = [n for n in lost if n in self._ranks]
        for n, rank in self._ranks.items():
            if rank.signalled and rank.last is not None and rank.last.what is What.LEFT:
                ranks.append(n)
        return {host for host in map(self._host_of, ranks) if host}

    def _host_of(self, rank: int) -> str:
        """By its name, or else by the order in which launchers fill hosts."""
        own = self._ranks[rank].host
        for host in self.job.hosts:
            if own.split(".")[0] == host.name.split(".")[0]:
                return host.name
        first = 0
        for host in self.job.hosts:
            first += host.slots
            if rank < first:
                return host.name
        return ""


def _longest_stop(job: Job) -> float:
    """Seconds, without limit where FARANDOLE_STALL_ABORT is 0 or no number, as ranks will say."""
    name = "FARANDOLE_STALL_ABORT"
    try:
        return float(job.environment.get(name) or setting(name)) or float("inf")
    except ValueError:
        return float("inf")


def say(text: str) -> None:
    """One line of the supervisor's story; the job outlives whoever reads it."""
    try:
        print(f"farandole: {text}", file=sys.stderr, flush=True)
    except OSError:  # `2>&1 | head` has seen enough; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
