# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks on one host under torchrun.

It also works under any other launcher that sets RANK, WORLD_SIZE and MASTER_PORT. The bootstrap
uses it.

Rank 0 listens on a Unix socket as long as its process lives. The socket's name follows from the
launcher's variables for one attempt of one job, and from the network namespace. Therefore every job
and every restart has a separate socket, and torch's store can have the port MASTER_PORT. The
socket's name can be guessed, but no other user can enter the socket's folder.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from farandole.errors import LibraryError
from farandole.start import sockets
from farandole.start.launchers import ALONE, TORCHRUN
from farandole.start.rendezvous import RendezvousServer
from farandole.start.secret import mac

_WAITS = (0.25,) * 10  # seconds; the core keeps the socket of a killed process for 2 s
_server: RendezvousServer | None = None  # exists on rank 0 only


def job() -> bytes:
    """Returns an identifier of this attempt of this job. It is not secret."""
    words = ["init", str(TORCHRUN.size)]
    words += [os.environ.get(name, "") for name in TORCHRUN.job.split()]
    return mac(b"", *(word.encode() for word in words))


def open_rendezvous() -> tuple[str, bytes]:
    """Returns the address and secret of the ranks' socket. Rank 0 first opens the socket.

    Other ranks may have to wait until it is open. Raises LibraryError, with a remedy, if the socket
    cannot be opened.
    """
    global _server
    check()
    secret = job()
    path = sockets.path_of(mac(secret, _network())[:16].hex())
    if TORCHRUN.rank == 0 and (_server is None or _server.address != path):
        if _server is not None:  # the server of an earlier job of this process
            _server.close()
            _server = None
        _server = _opened(path, secret)
    return path, secret


def _opened(path: str, secret: bytes) -> RendezvousServer:
    """Opens the rendezvous. Waits while the socket of a killed rank 0 still exists."""
    for wait in (*_WAITS, 0.0):
        try:
            return RendezvousServer(TORCHRUN.size, secret, path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LibraryError(
                    f"rank 0 can't open the rendezvous of this job: {error}"
                ) from error
            used = error
        time.sleep(wait)
        sockets.path_of()  # removes the socket of a killed process
    raise LibraryError(
        f"rank 0 can't open the rendezvous of this job: {used}: another job with the same "
        f"MASTER_PORT={os.environ['MASTER_PORT']} runs on this machine. Remedy: give each job its "
        "own port"
    ) from used


def _network() -> bytes:
    """Returns an identifier of the network namespace.

    Containers that share a folder may use the same MASTER_PORT.
    """
    return str(Path("/proc/self/ns/net").stat().st_ino).encode()


def on_several_hosts() -> bool:
    """Returns True if the launcher says that some of its processes run on other hosts."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return here.isdecimal() and int(here) != TORCHRUN.size


def remedy() -> str:
    """Returns the remedy that errors about missing ranks name."""
    return (
        f"WORLD_SIZE says {TORCHRUN.size} processes, which must all be on this host (unless "
        "LOCAL_WORLD_SIZE says that fewer are), with the same MASTER_ADDR and MASTER_PORT; "
        f"{ALONE}"
    )


def check() -> None:
    """Raises LibraryError if the launcher's variables do not give this process a place."""
    size, rank = TORCHRUN.size, TORCHRUN.rank
    text = f"WORLD_SIZE says {size} processes, "
    if not 0 <= rank < size or not os.environ.get("MASTER_PORT"):
        found = {name: os.environ.get(name, "") for name in ("RANK", "MASTER_PORT")}
        raise LibraryError(
            f"{text}but RANK={found['RANK']} and MASTER_PORT={found['MASTER_PORT']} do not give "
            "this process's rank and the port where they meet. Remedy: start with torchrun or "
            f"mpirun, or unset WORLD_SIZE; {ALONE}"
        )
