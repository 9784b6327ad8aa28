# SPDX-License-Identifier: Apache-2.0
"""Finds where ranks of torchrun meet on one host, or those of whoever sets RANK, WORLD_SIZE and
MASTER_PORT as it does. For the bootstrap.

Rank 0 serves a Unix socket as long as its process lives. The name comes from what the launcher
tells all ranks of one attempt of one job, and from the network to which MASTER_PORT belongs. So it
is not in the way of the store that torch has at MASTER_PORT, and every job and every restart has
its own name. It can be guessed, but lies where no other user can look or make anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from farandole.errors import LibraryError
from farandole.start import sockets
from farandole.start.launchers import ALONE, TORCHRUN
from farandole.start.rendezvous import RendezvousServer
from farandole.start.secret import mac

_server: RendezvousServer | None = None  # rank 0's


def job() -> bytes:
    """Names this attempt of this job. Anybody may know the name."""
    words = ["init", str(TORCHRUN.size)]
    words += [os.environ.get(name, "") for name in TORCHRUN.job.split()]
    return mac(b"", *(word.encode() for word in words))


def open_rendezvous() -> tuple[str, bytes]:
    """Address and secret of the socket where the ranks meet; it may take a moment until rank 0
    serves it. Raises LibraryError, with the remedy, where that is impossible."""
    global _server
    check()
    secret = job()
    path = sockets.path_of(mac(secret, _network())[:16].hex())
    if TORCHRUN.rank == 0 and (_server is None or _server.address != path):
        if _server is not None:  # of an earlier job of this process
            _server.close()
            _server = None
        try:
            _server = RendezvousServer(TORCHRUN.size, secret, path)
        except OSError as error:
            raise LibraryError(
                f"rank 0 can't open the rendezvous of this job: {error}: another one with the same "
                f"MASTER_PORT={os.environ['MASTER_PORT']} runs on this machine. Remedy: give each "
                "job its own port"
            ) from error
    return path, secret


def _network() -> bytes:
    """The network namespace: containers that share a folder may all have a MASTER_PORT 29500."""
    return str(Path("/proc/self/ns/net").stat().st_ino).encode()


def on_several_hosts() -> bool:
    """Whether the launcher says that some of its processes run on other hosts."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return here.isdecimal() and int(here) != TORCHRUN.size


def remedy() -> str:
    """What to do about ranks that do not come, for errors."""
    return (
        f"WORLD_SIZE says {TORCHRUN.size} processes, which must all be on this host (unless "
        "LOCAL_WORLD_SIZE says that fewer are), with the same MASTER_ADDR and MASTER_PORT; "
        f"{ALONE}"
    )


def check() -> None:
    """Raises LibraryError where the variables do not tell this process's place."""
    size, rank = TORCHRUN.size, TORCHRUN.rank
    text = f"WORLD_SIZE says {size} processes, "
    if not 0 <= rank < size or not os.environ.get("MASTER_PORT"):
        found = {name: os.environ.get(name, "") for name in ("RANK", "MASTER_PORT")}
        raise LibraryError(
            f"{text}but RANK={found['RANK']} and MASTER_PORT={found['MASTER_PORT']} do not tell "
            "this one's place among them and where they meet. Remedy: start with torchrun or "
            f"mpirun, or unset WORLD_SIZE; {ALONE}"
        )
