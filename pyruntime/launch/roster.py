# SPDX-License-Identifier: Apache-2.0
"""Which hosts a supervised job may use now: those that were given or that a script prints, without
those that have failed lately. For the supervisor; the script runs on a thread of the roster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from farandole.launch.job import Host, parse_host

_PERIOD = 1.0  # seconds between two looks at what the script prints
_SCRIPT_SECONDS = 30.0


class Blacklist:
    """Hosts that have failed: each is left out for a time, twice as long after each failure."""

    def __init__(
        self, shortest: float, longest: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`shortest`, `longest`: seconds."""
        self._shortest, self._longest, self._now = shortest, longest, now
        self._failures: dict[str, tuple[int, float]] = {}  # how many, and when the time is over

    def add(self, name: str) -> float:
        """Notes a failure; returns the seconds that the host is left out for."""
        times = self._failures.get(name, (0, 0.0))[0]
        seconds = min(self._longest, self._shortest * 2.0**times)
        self._failures[name] = times + 1, self._now() + seconds
        return seconds

    def has(self, name: str) -> bool:
        """Whether the host is left out now."""
        return self._failures.get(name, (0, 0.0))[1] > self._now()

    def known(self) -> set[str]:
        """All that have ever failed."""
        return set(self._failures)


class Roster:
    """The hosts, a context manager: inside it a thread runs the script once a second.

    A script that fails, or prints what is no host, changes nothing: what it printed last holds.
    """

    def __init__(
        self, hosts: Sequence[Host], script: str, slots: int, say: Callable[[str], object]
    ) -> None:
        """`script`: a command for the shell, which prints lines `name:slots`; empty: `hosts` stay.
        `slots`: of a host whose line has no number."""
        self.hosts = tuple(hosts)
        self.scripted = bool(script)
        self._script, self._slots, self._say = script, slots, say
        self._wrong = ""  # with the script's last output
        self._process: subprocess.Popen[str] | None = None  # the script's last one
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)

    def __enter__(self) -> Roster:
        if self.scripted:
            self.look()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._end_script()
        if self.scripted:
            self._thread.join(_PERIOD)

    def look(self) -> None:
        """Runs the script."""
        wrong = ""
        try:
            self.hosts = self._ask()
        except (ValueError, OSError, subprocess.SubprocessError) as reason:
            wrong = str(reason)
        if wrong and wrong != self._wrong and not self._end.is_set():
            self._say(f"{wrong}; the hosts stay as they were: {places(self.hosts) or 'none'}")
        self._wrong = wrong

    def _ask(self) -> tuple[Host, ...]:
        code, out, errors = self._run()
        if code != 0:
            last = errors.strip().splitlines()[-1:]
            raise ValueError(": ".join([f"{self._script} ended with {code}", *last]))
        lines = filter(None, (line.strip() for line in out.splitlines()))
        try:
            found = [parse_host(line, self._slots) for line in lines]
        except ValueError as reason:
            raise ValueError(f"{self._script} printed what is no list of hosts: {reason}") from None
        return tuple({host.name: host for host in found}.values())

    def _run(self) -> tuple[int, str, str]:
        """The script's exit code and what it prints. Raises TimeoutExpired."""
        with subprocess.Popen(
            self._script,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # all that it starts is one group
        ) as self._process:
            try:
                out, errors = self._process.communicate(timeout=_SCRIPT_SECONDS)
            except subprocess.TimeoutExpired:
                self._end_script()
                raise
        return self._process.returncode, out, errors

    def _end_script(self) -> None:
        """Ends it with all that it has started, if it runs."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._end.wait(_PERIOD):
            with contextlib.suppress(Exception):  # of threads that can't start, say
                self.look()


def plan(
    hosts: Sequence[Host], blacklist: Blacklist, least: int, most: int | None
) -> tuple[Host, ...]:
    """The hosts, and how many slots of each, for `least` to `most` ranks; empty: too few."""
    chosen: list[Host] = []
    left = most if most is not None else sum(host.slots for host in hosts)
    for host in hosts:
        if left > 0 and not blacklist.has(host.name):
            chosen.append(Host(host.name, min(host.slots, left)))
            left -= chosen[-1].slots
    return tuple(chosen) if ranks_on(chosen) >= least else ()


def ranks_on(hosts: Sequence[Host]) -> int:
    """How many ranks these hosts take."""
    return sum(host.slots for host in hosts)


def places(hosts: Sequence[Host]) -> str:
    """`2 on a, 2 on b`, for texts."""
    return ", ".join(f"{host.slots} on {host.name}" for host in hosts)
