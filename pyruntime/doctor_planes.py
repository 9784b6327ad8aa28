# SPDX-License-Identifier: Apache-2.0
"""The self tests of `farandole doctor`: every collective on every plane, with known answers.

A plane is one function that yields findings; it is collective, so all ranks must run the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from farandole.finding import Finding, Level

__all__ = ["PLANES"]

_SIZES = {"rides along": 10, "one block": 10_000, "many blocks": 1_000_000}  # float32 elements


def _host_plane(timeout: float) -> Iterator[Finding]:
    """CPU tensors: through shared memory in a host, between hosts by the wire."""
    import farandole as fd

    rank, size = fd.rank(), fd.size()
    everyone = np.arange(size)
    wrong = []
    start = time.perf_counter()
    for label, n in _SIZES.items():
        x = np.full(n, rank + 1, np.float32)
        total = fd.allreduce(x, op=fd.Sum, name=f"doctor.sum.{n}", timeout=timeout)
        if not (total == size * (size + 1) / 2).all():
            wrong.append(f"allreduce ({label})")
    row = np.full((1, 3), rank, np.int64)
    if fd.allgather(row, name="doctor.gather", timeout=timeout)[:, 0].tolist() != [*everyone]:
        wrong.append("allgather")
    if fd.broadcast(row, size - 1, name="doctor.broadcast", timeout=timeout)[0, 0] != size - 1:
        wrong.append("broadcast")
    part = fd.reducescatter(np.arange(size), op=fd.Sum, name="doctor.scatter", timeout=timeout)
    if part.tolist() != [rank * size]:
        wrong.append("reducescatter")
    swapped = fd.alltoall(everyone + size * rank, name="doctor.alltoall", timeout=timeout)
    if swapped.tolist() != (everyone * size + rank).tolist():
        wrong.append("alltoall")
    fd.barrier(timeout=timeout)
    ms = (time.perf_counter() - start) * 1e3
    name = "self test, CPU"
    if wrong:
        remedy = "do not train here; please report this with the whole table"
        yield Finding(name, Level.ERROR, f"wrong results: {', '.join(wrong)}", remedy)
    elif ms > timeout * 1e3:
        text = f"right, but it took {ms:.0f} ms"
        yield Finding(name, Level.WARNING, text, "see the lines about cores")
    else:
        yield Finding(name, Level.OK, f"all collectives right on {size} rank(s)")


PLANES: list[Callable[[float], Iterator[Finding]]] = [_host_plane]
