# SPDX-License-Identifier: Apache-2.0
"""Where this rank stands: in the world, on its host, and across hosts.

In a forked child, such as a DataLoader's worker, all this is answered for the rank that it was
forked from, as that was then.
"""

from __future__ import annotations

from typing import Any

from farandole._library import ffi, lib

__all__ = [
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def is_initialized() -> bool:
    """Whether init() has run and shutdown() has not. Never raises."""
    return bool(lib.farandole_where(ffi.new("farandole_topology*")) == lib.FARANDOLE_OK)


def _where() -> Any:
    topology = ffi.new("farandole_topology*")
    if lib.farandole_where(topology) != lib.FARANDOLE_OK:
        raise ValueError("farandole is not initialised: call farandole.init() first")
    return topology


def rank() -> int:
    """This process's number among all, from 0. Raises ValueError when not initialised."""
    return int(_where().rank)


def size() -> int:
    """The number of processes. Raises ValueError when not initialised."""
    return int(_where().size)


def local_rank() -> int:
    """This process's number on its host, from 0. Raises ValueError when not initialised."""
    return int(_where().local_rank)


def local_size() -> int:
    """The number of processes on this host. Raises ValueError when not initialised."""
    return int(_where().local_size)


def cross_rank() -> int:
    """This host's number among hosts that have this local rank. ValueError if not initialised."""
    return int(_where().cross_rank)


def cross_size() -> int:
    """The number of hosts that have this local rank. Raises ValueError when not initialised."""
    return int(_where().cross_size)


def is_homogeneous() -> bool:
    """Whether every host holds as many ranks. Raises ValueError when not initialised."""
    return bool(_where().homogeneous)
