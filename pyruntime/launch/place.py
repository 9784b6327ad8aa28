# SPDX-License-Identifier: Apache-2.0
"""Sets torchrun's variables (RANK, MASTER_ADDR, ...) for ranks that MPI's launchers start.

On each rank, a shell exports the variables and then becomes the rank's program.
"""

from __future__ import annotations

import os
import random
import shlex
import socket
from pathlib import Path

from farandole.launch.job import Host, Job, is_inherited
from farandole.start.places import first_of_allocation

_WIDTH = 12_000  # number of ports to choose from, just below the kernel's ephemeral ports
_TRIES = 100


def with_place(job: Job, place: str, first: Host | None) -> list[str]:
    """Returns a shell command that exports variables and then runs the job's command.

    The variables are those in `place`, such as `RANK=$PMI_RANK`, and the address of a store on
    `first`, the host of rank 0. A command for several programs (`a : -np 2 b`) is returned
    unchanged.
    """
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
    """Returns the user's value for a variable, or "" if the user has set none."""
    own = "" if is_inherited(name) else os.environ.get(name, "")
    return job.environment.get(name) or own


def _address(job: Job, first: Host | None) -> str:
    """Returns the name under which other hosts know the host of rank 0."""
    if job.here:
        return "localhost"
    if first is not None:
        return socket.gethostname() if first.is_here else first.name
    return first_of_allocation() or socket.gethostname()


def free_port() -> int:
    """Returns a free port of this machine, if possible below the range of ephemeral ports.

    The launcher and MPI take many ephemeral ports before rank 0 opens the returned port.
    """
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
    """Returns the port if it is free, else 0. Port 0 stands for any free port."""
    with socket.socket() as found:
        try:
            found.bind(("", port))
        except OSError:
            return 0
        return int(found.getsockname()[1])
