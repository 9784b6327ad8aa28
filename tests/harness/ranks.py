# SPDX-License-Identifier: Apache-2.0
"""What many tests on several ranks do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from mpi4py import MPI

import farandole as fd

__all__ = ["last", "restarted"]


def last() -> int:
    """The last rank."""
    return fd.size() - 1


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
