# SPDX-License-Identifier: Apache-2.0
"""What many tests on several ranks do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from mpi4py import MPI

import farandole as fd

__all__ = ["last", "mine", "restarted", "total"]


def last() -> int:
    """The last rank."""
    return fd.size() - 1


def mine(turn: int = 0) -> float:
    """This rank's number in that turn."""
    return 1.0 + fd.rank() + 10 * turn


def total(turn: int = 0) -> float:
    """The sum of all ranks' numbers."""
    return sum(1.0 + rank + 10 * turn for rank in range(fd.size()))


@contextlib.contextmanager
def restarted(**env: str) -> Iterator[None]:
    """The runtime starts anew with these variables, and without them after the block."""
    with pytest.MonkeyPatch.context() as patch:
        fd.shutdown()
        MPI.COMM_WORLD.Barrier()
        for name, value in env.items():
            patch.setenv(name, value)
        fd.init()
        yield
        fd.shutdown()
        MPI.COMM_WORLD.Barrier()
    fd.init()
