# SPDX-License-Identifier: Apache-2.0
"""Calls in flight whose owners go away: the last rank comes late, so the others' calls wait for it.

Canaries then take the memory that was freed: nobody may write to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import farandole as fd

SIZE = 4096  # elements: more than travels with a report, less than glibc maps apart
CANARY = 7.25


def late() -> bool:
    return fd.rank() == fd.size() - 1


def mine() -> float:
    return 1.0 + fd.rank()


def everyones() -> float:
    return sum(1.0 + rank for rank in range(fd.size()))


@contextmanager
def canaries() -> Iterator[None]:
    """Tensors and arrays of many sizes, made after something was dropped; checked at the end."""
    MPI.COMM_WORLD.Barrier()  # the late rank comes when all others have dropped their calls
    gc.collect()
    sizes = [SIZE] * 24 + [SIZE - 8, SIZE + 8, 3, 9, 11, 18] * 4
    tensors = [torch.full((size,), CANARY) for size in sizes]
    arrays = [np.full(size, CANARY) for size in sizes]
    yield
    assert all(bool((x == CANARY).all()) for x in tensors)
    assert all(bool((x == CANARY).all()) for x in arrays)


def finish(call: Callable[[], Any]) -> None:
    """The late rank makes the call that the others have dropped; all wait until it is over."""
    if late():
        call()
    fd.barrier()
    assert float(fd.allreduce(np.array([mine()]), op=fd.Sum, name="after")[0]) == everyones()
