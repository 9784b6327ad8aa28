# SPDX-License-Identifier: Apache-2.0
"""Describes a job that is to be started: its command, ranks, hosts and environment.

`farandole run` and farandole.run() use it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farandole.start.launchers import LAUNCHERS

# Variables that are forwarded to other hosts. The option `-x` adds more. Ranks on this host inherit
# all variables.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES")
_FORWARDED_PREFIXES = (
    *("FARANDOLE_", "HOROVOD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_"),
    *("NCCL_", "GLOO_", "TORCH", "HF_"),
)
SEARCH_PATHS = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}
_OF_A_RANK = re.compile("|".join(row.leaves for row in LAUNCHERS if row.leaves))
_MEETING = ("MASTER_ADDR", "MASTER_PORT")  # set by the user, unless RANK is set as well


@dataclass(frozen=True)
class Host:
    """A machine and its number of slots for ranks."""

    name: str
    slots: int

    @property
    def is_here(self) -> bool:
        """True if `name` is one of this machine's names. An alias counts as another machine."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.split(".")[0]}


@dataclass(frozen=True)
class Job:
    """One launch of a set of ranks.

    If `hosts` is empty, ranks run on this machine or in the batch system's allocation.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # variables set for all ranks
    forwarded: tuple[str, ...] = ()  # names of more variables to forward to other hosts
    binding: tuple[str, ...] | None = None  # the launcher's options; None means no binding
    oversubscribe: bool = False
    tag: bool = False  # True if output lines start with the rank's number
    timestamp: bool = False  # True if output lines start with the time
    output: str | None = None  # prefix of the names of files for the ranks' output
    interfaces: str | None = None  # names of network interfaces, comma-separated
    ssh_port: int | None = None
    ssh_identity: str | None = None
    extra: tuple[str, ...] = ()  # options that the user passes to the launcher

    @property
    def here(self) -> bool:
        """True if all ranks will run on this machine, judging by the names of the hosts."""
        if self.hosts:
            return all(host.is_here for host in self.hosts)
        return not any(name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"))

    @property
    def crowded(self) -> bool:
        """True if this machine gets more ranks than it has cores."""
        return self.here and self.ranks > len(os.sched_getaffinity(0))

    def names_to_forward(self) -> list[str]:
        """Returns the names of the variables to forward to other hosts."""
        found = [x for x in os.environ if x in _FORWARDED or x.startswith(_FORWARDED_PREFIXES)]
        kept = {x for x in found if not is_inherited(x)}
        return sorted({*kept, *self.environment, *self.forwarded})


def outer_environment(job: Job) -> dict[str, str]:
    """Returns the launcher's environment.

    It consists of the caller's variables, without those that only ranks have, and of the job's
    variables. Empty entries of search paths are removed, because an empty entry means the working
    folder, where another user may have put a library.
    """
    kept = {k: v for k, v in os.environ.items() if not is_inherited(k)}
    found = {**kept, **job.environment}
    for name in SEARCH_PATHS & found.keys():
        found[name] = ":".join(filter(None, found[name].split(":")))
    return {k: v for k, v in found.items() if v or k not in SEARCH_PATHS}


def is_inherited(name: str) -> bool:
    """Returns True if this process has the variable only because it is a rank or a rank's child."""
    return bool(_OF_A_RANK.match(name)) or (name in _MEETING and "RANK" in os.environ)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parses a list such as `a:4,b:2`. A name without a number has one slot. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    hosts = tuple(parse_host(part) for part in parts if part)
    if not hosts:
        raise ValueError(f"{text!r} names no host")
    return hosts


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """Parses lines such as `a slots=4`, `a:4` or `a`, in which `#` starts a comment.

    Raises ValueError and OSError.
    """
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    hosts = []
    for line in filter(None, lines):
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\S+)(\s+max[-_]slots\s*=\s*\d+)?", line)
        hosts.append(parse_host(f"{match[1]}:{match[2]}" if match else line, text=line))
    if not hosts:
        raise ValueError(f"{path} names no host")
    return tuple(hosts)


def parse_host(given: str, slots: int = 1, text: str = "") -> Host:
    """Parses a host such as `a:4`. A name without a number has `slots` slots.

    If it raises a ValueError, the error quotes `text`, or `given` if `text` is empty.
    """
    name, _, number = given.partition(":")
    if not re.fullmatch(r"[\w.][\w.\-]*", name) or not re.fullmatch(r"[1-9]\d*|", number):
        raise ValueError(f"{text or given!r} is not a host: write NAME or NAME:SLOTS")
    return Host(name, int(number or slots))
