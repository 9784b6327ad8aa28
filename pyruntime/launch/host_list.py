# SPDX-License-Identifier: Apache-2.0
"""The hosts that an elastic job may use: given hosts, or hosts that a discovery script prints.

The supervisor uses it. A separate thread runs the script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from farandole.launch.job import Host, parse_host

_NO_COMMAND = (126, 127)  # exit codes of a shell that cannot run its command
_PERIOD = 1.0  # seconds between two runs of the script
_SCRIPT_SECONDS = 30.0  # time limit for one run


class HostList:
    """Context manager during which a thread runs the discovery script every second.

    The attribute `hosts` is the present list. If the script fails, or prints anything but hosts,
    the list stays as it is.
    """

    def __init__(
        self, hosts: Sequence[Host], script: str, slots: int, say: Callable[[str], object]
    ) -> None:
        """`script` is a shell command that prints lines such as `name:slots`.

        If `script` is empty, the list is always `hosts`. `slots` is the number of slots for a line
        without a number.
        """
        self.hosts = tuple(hosts)
        self.scripted = bool(script)
        self._script, self._slots, self._say = script, slots, say
        self._wrong = ""  # error in the script's last output
        self._code = 0  # the script's last exit code
        self._process: subprocess.Popen[str] | None = None  # the script's last run
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
        """Runs the script and updates the list."""
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
        """Returns the script's exit code, output and error output. Raises TimeoutExpired."""
        with subprocess.Popen(
            self._script,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all children of the script can be killed
        ) as self._process:
            try:
                out, errors = self._process.communicate(timeout=_SCRIPT_SECONDS)
            except subprocess.TimeoutExpired:
                self._end_script()
                raise
        return self._process.returncode, out, errors

    def _end_script(self) -> None:
        """If the script is running, kills it and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._end.wait(_PERIOD):
            with contextlib.suppress(Exception):  # for example, if no thread can be started
                self.look()


def ranks_on(hosts: Sequence[Host]) -> int:
    """Returns the number of slots on these hosts."""
    return sum(host.slots for host in hosts)


def places(hosts: Sequence[Host]) -> str:
    """Returns the hosts as a text for messages, such as `2 on a, 2 on b`."""
    return ", ".join(f"{host.slots} on {host.name}" for host in hosts)
