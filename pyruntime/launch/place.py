# SPDX-License-Identifier: Apache-2.0
"""Variables that torchrun sets and MPI's launchers do not: RANK and its like. For the launchers,
whose ranks get them from a shell that then becomes their program."""

from __future__ import annotations

import os
import random
import shlex
import socket
from pathlib import Path

from farandole.launch.job import Host, Job, is_inherited
from farandole.start.places import first_of_allocation

_WIDTH = 12_000  # so many ports below those that the kernel gives away by itself
_TRIES = 100


def with_place(job: Job, place: str, first: Host | None) -> list[str]:
    """The job's command behind a shell that sets `place`, words like `RANK=$PMI_RANK`, and where
    rank 0, on the host `first`, may serve a store. The bare command if its words start several
    programs (`a : -np 2 b`)."""
    if ":" in job.command:
        return list(job.command)
    address, port = _chosen("MASTER_ADDR", job), _chosen("MASTER_PORT", job)
    where = {
        "MASTER_ADDR": address or _address(job, first),
        "MASTER_PORT": port or str(free_port()),
    }
    words = [place, *(f"{name}={shlex.quote(value)}" for name, value in where.items())]
    return ["sh", "-c", f'export {" ".join(words)}; exec "$@"', "rank", *job.command]


def _chosen(name: str, job: Job) -> str:
    """What the user has set; "" for nothing."""
    own = "" if is_inherited(name) else os.environ.get(name, "")
    return job.environment.get(name) or own


def _address(job: Job, first: Host | None) -> str:
    """A name of the first host that the others know."""
    if job.here:
        return "localhost"
    if first is not None:
        return socket.gethostname() if first.is_here else first.name
    return first_of_allocation() or socket.gethostname()


def free_port() -> int:
    """A port that nobody has on this machine, if possible one that the kernel gives to nobody who
    asks for any: the launcher and MPI ask for many before rank 0 opens it."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 0
    ports = range(max(1024, lowest - _WIDTH), lowest)
    for port in random.SystemRandom().sample(ports, min(_TRIES, len(ports))):
        if _bound(port):
            return port
    return _bound(0)


def _bound(port: int) -> int:
    """The port, if it can be had; 0: it can't."""
    with socket.socket() as found:
        try:
            found.bind(("", port))
        except OSError:
            return 0
        return int(found.getsockname()[1])
