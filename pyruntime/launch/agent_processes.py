# SPDX-License-Identifier: Apache-2.0
"""The agents that a supervisor starts: on its own host, by ssh, or by Slurm's srun. For the
supervisor, on its thread."""

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

from farandole.errors import error_text
from farandole.launch.agent import CONTACT, MODULE, PREEMPTED, say
from farandole.launch.job import Host, Job, outer_environment
from farandole.launch.programs import apart, own
from farandole.membership.workers import Workers

_PAUSES = (0.2, 30.0)  # shortest and longest, in seconds, before an agent that has ended is started
_TRIES = 6  # that end alike, quickly, before no agent is expected there
_NETWORK = 255  # the exit code of ssh where it does not get there; it may, later
_CALL = 20.0  # seconds at least for an agent that was started to call
_END = 10.0  # seconds for agents to end when the job is over
# Without these no Python starts; the agent gets all others by ssh's standard input.
_FOR_SSH = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_SLURM = "the allocation"


class _Started:
    """One agent's process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pause, self.next = _PAUSES[0], 0.0
        self.since = time.monotonic()  # when the first one after the last that worked was started
        self.started = 0.0  # when the present one was
        self.code, self.alike = 0, 0  # of those that have ended quickly, without a break
        self.preempted = False  # its host is taken away: none is started there any more


class AgentProcesses:
    """A context manager; what it has started is gone when the context is left."""

    def __init__(self, job: Job, folder: Path, contact: str, deaf: float) -> None:
        """`folder`: the job's, which all hosts see. `contact`: see agent.py. `deaf`: seconds of
        silence after which an agent is ended, so that another one may come."""
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
        """Starts agents where none is: on these hosts; without any, in Slurm's allocation, or
        here. `workers` has heard from them."""
        wanted = {host.name: self._command(host) for host in hosts}
        if not wanted and not scripted:
            alone = not _is_allocation()
            here = self._here(socket.gethostname(), self._job.ranks)
            wanted = {"": here} if alone else {_SLURM: self._of_slurm()}
        for name in self._started.keys() - wanted.keys():
            self._started[name].preempted = False  # the host may be given again
        for name, command in wanted.items():
            each = self._started.setdefault(name, _Started())
            if name != _SLURM:  # whose agents are one process here
                host = name or socket.gethostname()
                self._end_deaf(name, each, workers.last_heard(host))
                if workers.is_reachable(host, time.monotonic()):
                    continue  # though the ssh that has started it may be gone
            self._start(name, command, each)

    def _end_deaf(self, name: str, each: _Started, heard: float) -> None:
        """Ends an agent that is stopped, say: its ranks end with it. The next one ends it where
        this process can't, because ssh has started it."""
        now = time.monotonic()
        first = each.since + max(_CALL, self._deaf)
        if now > (heard + self._deaf if heard > each.since else first):
            each.since = now
            if each.process is not None and each.process.poll() is None:
                each.process.kill()
                each.process.wait()
                say(f"the agent{' on ' * bool(name)}{name} does not answer: it is ended")

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
            told = self._told if command[0] == "ssh" else None
            pipe = subprocess.DEVNULL if told is None else subprocess.PIPE
            each.process = subprocess.Popen(apart(command), stdin=pipe, env=self._environment)
            if told is not None and each.process.stdin is not None:
                with contextlib.suppress(OSError), each.process.stdin as to:  # it may have ended
                    to.write(told)
        except OSError as reason:  # too many processes, say
            say(f"no agent can be started now: {error_text(reason)}")
            self._note_end(name, None, each, now)

    def _note_end(self, name: str, code: int | None, each: _Started, now: float) -> None:
        """`code`: of its exit; None: it was not started."""
        quick = now < each.started + _CALL
        each.alike = each.alike + 1 if quick and code == each.code else int(quick)
        each.code = -1 if code is None else code
        each.preempted = code == PREEMPTED
        each.next = each.since = now + each.pause
        each.pause = min(_PAUSES[1], 2 * each.pause) if quick else _PAUSES[0]
        if code not in (PREEMPTED, None):
            say(f"the agent{' on ' * bool(name)}{name} has ended with {code}")

    def failing(self) -> dict[str, str]:
        """By host, why no agent runs there: each has ended at once with the same exit code."""
        return {
            name: f"the agent{' on ' * bool(name)}{name} has ended with {each.code} at each of "
            f"{each.alike} starts, as its error says"
            for name, each in self._started.items()
            if each.alike >= _TRIES and 0 < each.code < _NETWORK and each.code != PREEMPTED
        }

    def wait(self) -> None:
        """Waits until all have ended, for some seconds."""
        until = time.monotonic() + _END
        for each in self._started.values():
            if each.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(0.0, until - time.monotonic()))

    # ---- commands

    def _here(self, name: str, slots: int) -> list[str]:
        words = own(MODULE, str(self._folder), "--slots", str(slots))
        return [*words, *(["--host", name] if name else [])]

    @property
    def _told(self) -> bytes:
        """What the ranks' environment on other hosts is to be. It may hold secrets: it goes by
        ssh's standard input, not by its words, which all users of both hosts can read."""
        known, names = self._environment, [*self._job.names_to_forward(), CONTACT]
        return json.dumps({name: known[name] for name in names if name in known}).encode()

    def _command(self, host: Host) -> list[str]:
        command = self._here(host.name, host.slots)
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

    def _of_slurm(self) -> list[str]:
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        slots = -(-self._job.ranks // nodes)
        words = [shutil.which("srun") or "srun", "--no-kill", "--kill-on-bad-exit=0"]
        words += [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL"]
        return [*words, "--mpi=none", "--cpu-bind=none", "--overlap", *self._here("", slots)]


def _is_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
