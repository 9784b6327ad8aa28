# SPDX-License-Identifier: Apache-2.0
"""Starts and restarts the agents of an elastic job on this host, by ssh, or by Slurm's srun.

The supervisor uses this on its thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from farandole.errors import error_text
from farandole.launch.agent import CONTACT, MODULE, PREEMPTED, say
from farandole.launch.job import Host, Job, outer_environment
from farandole.launch.programs import apart, own
from farandole.membership.workers import Workers
from farandole.start import system_calls

_PAUSES = (0.2, 30.0)  # shortest and longest pause before a restart, in seconds
# An agent counts as failing after so many quick ends with the same exit code.
_TRIES = 6
_NETWORK = 255  # exit code of ssh if it cannot connect; a later attempt may succeed
_CALL = 20.0  # minimum time in seconds that a new agent has to connect
_END = 10.0  # time in seconds that agents have to end after the job
# Python cannot start without these variables. The agent gets all others from ssh's standard input.
_FOR_SSH = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_SLURM = "the allocation"


class _Started:
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pause, self.next = _PAUSES[0], 0.0
        self.since = time.monotonic()  # time of the first start after the last success
        self.started = 0.0  # time of the last start
        # The last exit code, and the number of successive quick ends with that code.
        self.code, self.alike = 0, 0
        self.preempted = False  # True if the host is being preempted, so that no restart follows


class AgentProcesses:
    """Context manager that starts agents, and kills those processes when the block ends."""

    def __init__(self, job: Job, folder: Path, contact: str, deaf: float) -> None:
        """`folder` is the folder for commits, which all hosts share.

        `contact` is the value of the variable agent.CONTACT. An agent is replaced after `deaf`
        seconds without a report.
        """
        self._job, self._folder, self._deaf = job, folder, deaf
        self._environment = {**outer_environment(job), CONTACT: contact}
        self._started: dict[str, _Started] = {}
        self._cwd = str(Path.cwd())

    def __enter__(self) -> AgentProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._started.values():
            if each.process is not None and each.process.poll() is None:
                each.process.kill()
                each.process.wait()

    def tend(self, hosts: Iterable[Host], scripted: bool, workers: Workers) -> None:
        """Starts missing agents and replaces silent ones.

        If there are no `hosts` and there is no discovery script, starts agents in Slurm's
        allocation, or else on this host. `workers` knows when each agent has last reported.
        """
        wanted = {host.name: self._host_command(host) for host in hosts}
        if not wanted and not scripted:
            alone = not _is_allocation()
            here = self._local_command(socket.gethostname(), self._job.ranks)
            wanted = {"": here} if alone else {_SLURM: self._srun_command()}
        for name in self._started.keys() - wanted.keys():
            self._started[name].preempted = False  # the host may come back
        for name, command in wanted.items():
            each = self._started.setdefault(name, _Started())
            if name != _SLURM:  # one srun starts all agents of an allocation
                host = name or socket.gethostname()
                self._kill_silent(name, each, workers.last_heard(host))
                if workers.is_reachable(host, time.monotonic()):
                    continue  # the agent works, even if its ssh has ended
            self._start(name, command, each)

    def _kill_silent(self, name: str, each: _Started, heard: float) -> None:
        """Kills an agent that does not report, for example a stopped agent. Its ranks die with it.

        If the agent is on another host, only its ssh can be killed here. The next agent then kills
        the old agent.
        """
        now = time.monotonic()
        first = each.since + max(_CALL, self._deaf)
        if now > (heard + self._deaf if heard > each.since else first):
            each.since = now
            if each.process is not None and each.process.poll() is None:
                each.process.kill()
                each.process.wait()
                say(f"the agent{' on ' * bool(name)}{name} does not answer: it is killed")

    def _start(self, name: str, command: list[str], each: _Started) -> None:
        now = time.monotonic()
        if each.process is not None:
            code = each.process.poll()
            if code is None:
                return
            each.process = None
            self._note_end(name, code, each, now)
        if now < each.next or each.preempted:
            return
        each.started = now
        try:
            data = self._remote_environment if command[0] == "ssh" else b""
            # Not a pipe, because ssh reads its input only once it has connected.
            with _in_memory(data) as file:
                each.process = subprocess.Popen(apart(command), stdin=file, env=self._environment)
        except OSError as reason:  # for example, too many processes
            say(f"no agent can be started now: {error_text(reason)}")
            self._note_end(name, None, each, now)

    def _note_end(self, name: str, code: int | None, each: _Started, now: float) -> None:
        """Schedules a restart.

        `code` is the exit code, or None if the process could not be started.
        """
        quick = now < each.started + _CALL
        each.alike = each.alike + 1 if quick and code == each.code else int(quick)
        each.code = -1 if code is None else code
        each.preempted = code == PREEMPTED
        each.next = each.since = now + each.pause
        each.pause = min(_PAUSES[1], 2 * each.pause) if quick else _PAUSES[0]
        if code not in (PREEMPTED, None):
            say(f"the agent{' on ' * bool(name)}{name} has ended with {code}")

    def failing(self) -> dict[str, str]:
        """Returns the hosts whose agents end at each start with the same exit code, and reasons."""
        return {
            name: f"the agent{' on ' * bool(name)}{name} has ended with {each.code} at each of "
            f"{each.alike} starts; see its error output"
            for name, each in self._started.items()
            if each.alike >= _TRIES and 0 < each.code < _NETWORK and each.code != PREEMPTED
        }

    def wait(self) -> None:
        """Waits until all agents have ended, but not longer than _END seconds."""
        until = time.monotonic() + _END
        for each in self._started.values():
            if each.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(0.0, until - time.monotonic()))

    # ---- commands

    def _local_command(self, name: str, slots: int) -> list[str]:
        words = own(MODULE, str(self._folder), "--slots", str(slots))
        return [*words, *(["--host", name] if name else [])]

    @property
    def _remote_environment(self) -> bytes:
        """The environment of an agent and its ranks on another host, as JSON.

        It may hold secrets. It is therefore sent over ssh's standard input, because all users of
        both hosts can see command lines.
        """
        known, names = self._environment, [*self._job.names_to_forward(), CONTACT]
        return json.dumps({name: known[name] for name in names if name in known}).encode()

    def _host_command(self, host: Host) -> list[str]:
        command = self._local_command(host.name, host.slots)
        if host.is_here:
            return command
        command.append("--environment")
        words = ["ssh", "-T", "-o", "BatchMode=yes"]
        words += ["-p", str(self._job.ssh_port)] if self._job.ssh_port else []
        words += ["-i", self._job.ssh_identity] if self._job.ssh_identity else []
        known = self._environment
        settings = [f"{name}={known[name]}" for name in _FOR_SSH if name in known]
        line = shlex.join(["env", *settings, *command])
        return [*words, host.name, f"cd {shlex.quote(self._cwd)} && exec {line}"]

    def _srun_command(self) -> list[str]:
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        slots = -(-self._job.ranks // nodes)
        words = [shutil.which("srun") or "srun", "--no-kill", "--kill-on-bad-exit=0"]
        words += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL"]
        return [
            *words,
            "--mpi=none",
            "--cpu-bind=none",
            "--overlap",
            *self._local_command("", slots),
        ]


def _in_memory(data: bytes) -> IO[bytes]:
    file = os.fdopen(system_calls.memfd_create("farandole-environment"), "w+b")
    file.write(data)
    file.seek(0)
    return file


def _is_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
