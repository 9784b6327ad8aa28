# SPDX-License-Identifier: Apache-2.0
"""Which hosts an elastic job may use now: those that were given or that a script prints. For the
supervisor; the script runs on a thread of the host_list."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from farandole.launch.job import Host, parse_host

_NO_COMMAND = (126, 127)  # a shell's exit codes where it can't run one
_PERIOD = 1.0  # seconds between two looks at what the script prints
_SCRIPT_SECONDS = 30.0


class HostList:
    """The hosts, a context manager: inside it a thread runs the script once a second.

    A script that fails, or prints what is not a host, changes nothing: its last valid output holds.
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
        self._code = 0  # its last exit code
        self._process: subprocess.Popen[str] | None = None  # the script's last one
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)

    def __enter__(self) -> HostList:
        if self.scripted:
            self.look()
            if self._code in _NO_COMMAND:
                raise ValueError(f"--host-discovery-script: {self._wrong}")
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
        self._code = code
        if code != 0:
            last = errors.strip().splitlines()[-1:]
            raise ValueError(": ".join([f"{self._script} ended with {code}", *last]))
        lines = filter(None, (line.strip() for line in out.splitlines()))
        try:
            found = [parse_host(line, self._slots) for line in lines]
        except ValueError as reason:
            raise ValueError(f"{self._script} did not print a list of hosts: {reason}") from None
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


def ranks_on(hosts: Sequence[Host]) -> int:
    """How many ranks these hosts take."""
    return sum(host.slots for host in hosts)


def places(hosts: Sequence[Host]) -> str:
    """`2 on a, 2 on b`, for texts."""
    return ", ".join(f"{host.slots} on {host.name}" for host in hosts)
