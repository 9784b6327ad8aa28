# SPDX-License-Identifier: Apache-2.0
"""Public calls that return this rank's number and the number of ranks in the world, on the rank's
host, and across hosts. They may be called from any thread.

In a forked child, such as a DataLoader worker, they return the parent's values at the time of the
fork.
"""

from __future__ import annotations

import sys
from typing import Any

from farandole._library import ffi, lib


def is_initialized() -> bool:
    """Returns True after init() and before shutdown(). Never raises.

    Examples:
        >>> hvd.is_initialized()
        True
    """
    return _asked() is not None


_kept: Any = None  # values of a rank that has left the job; kept until shutdown()


def keep() -> None:
    """Makes these calls return the present values until shutdown(), although the core stops."""
    global _kept
    _kept = _asked()


def forget() -> None:
    """Drops the values that keep() has stored."""
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
    """Returns the error for a call before init(). Its text names the package that the program has
    imported, because tests that Horovod's users write compare the text."""
    name = "Horovod" if "horovod" in sys.modules else "farandole"
    text = f"{name} has not been initialized: call init() first"
    started = sys.modules.get("multiprocessing.process")
    if started is not None and started.parent_process() is not None:
        text += "; a worker that a rank has spawned is not a rank: pass rank() and size() to it"
    return ValueError(text)


def rank() -> int:
    """Returns this process's number among all, counted from 0. Raises ValueError before init().

    Examples:
        >>> hvd.rank()
        0
    """
    return int(_where().rank)


def size() -> int:
    """Returns the number of processes. Raises ValueError before init().

    Examples:
        >>> hvd.size()
        1
    """
    return int(_where().size)


def local_rank() -> int:
    """Returns this process's number on its host, counted from 0. Raises ValueError before init().

    Examples:
        >>> hvd.local_rank()
        0
    """
    return int(_where().local_rank)


def local_size() -> int:
    """Returns the number of processes on this host. Raises ValueError before init().

    Examples:
        >>> hvd.local_size()
        1
    """
    return int(_where().local_size)


def cross_rank() -> int:
    """Returns this host's number among the hosts that have this local rank, counted from 0.

    Raises ValueError before init().

    Examples:
        >>> hvd.cross_rank()
        0
    """
    return int(_where().cross_rank)


def cross_size() -> int:
    """Returns the number of hosts that have this local rank. Raises ValueError before init().

    Examples:
        >>> hvd.cross_size()
        1
    """
    return int(_where().cross_size)


def is_homogeneous() -> bool:
    """Returns True if all hosts have the same number of ranks. Raises ValueError before init().

    Examples:
        >>> hvd.is_homogeneous()
        True
    """
    return bool(_where().homogeneous)
