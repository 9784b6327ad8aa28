# SPDX-License-Identifier: Apache-2.0
"""This rank's number and the number of ranks: in the world, on its host, and across hosts. Public
calls, for any thread.

In a forked child, such as a DataLoader's worker, the answers are those of the parent rank at the
time of the fork.
"""

from __future__ import annotations

import sys
from typing import Any

from farandole._library import ffi, lib


def is_initialized() -> bool:
    """Whether init() has run and shutdown() has not. Never raises.

    Examples:
        >>> hvd.is_initialized()
        True
    """
    return _asked() is not None


_kept: Any = None  # of a rank whose part in the job has ended, until shutdown()


def keep() -> None:
    """Keeps the answers while the core stops; only shutdown() ends them."""
    global _kept
    _kept = _asked()


def forget() -> None:
    """Undoes keep()."""
    global _kept
    _kept = None


def _asked() -> Any:
    topology = ffi.new("farandole_topology*")
    return topology if lib.farandole_where(topology) == lib.FARANDOLE_OK else _kept


def _where() -> Any:
    topology = _asked()
    if topology is None:
        raise not_initialized()
    return topology


def not_initialized() -> ValueError:
    """The error of a call before init(). It names what the program has imported: tests of Horovod's
    users compare the text."""
    name = "Horovod" if "horovod" in sys.modules else "farandole"
    text = f"{name} has not been initialized: call init() first"
    started = sys.modules.get("multiprocessing.process")
    if started is not None and started.parent_process() is not None:
        text += "; a worker that a rank has spawned is not a rank: hand it rank() and size()"
    return ValueError(text)


def rank() -> int:
    """This process's number among all, from 0. Raises ValueError when not initialised.

    Examples:
        >>> hvd.rank()
        0
    """
    return int(_where().rank)


def size() -> int:
    """The number of processes. Raises ValueError when not initialised.

    Examples:
        >>> hvd.size()
        1
    """
    return int(_where().size)


def local_rank() -> int:
    """This process's number on its host, from 0. Raises ValueError when not initialised.

    Examples:
        >>> hvd.local_rank()
        0
    """
    return int(_where().local_rank)


def local_size() -> int:
    """The number of processes on this host. Raises ValueError when not initialised.

    Examples:
        >>> hvd.local_size()
        1
    """
    return int(_where().local_size)


def cross_rank() -> int:
    """This host's number among those with this local rank. Raises ValueError when not initialised.

    Examples:
        >>> hvd.cross_rank()
        0
    """
    return int(_where().cross_rank)


def cross_size() -> int:
    """The number of hosts that have this local rank. Raises ValueError when not initialised.

    Examples:
        >>> hvd.cross_size()
        1
    """
    return int(_where().cross_size)


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks. Raises ValueError when not initialised.

    Examples:
        >>> hvd.is_homogeneous()
        True
    """
    return bool(_where().homogeneous)
