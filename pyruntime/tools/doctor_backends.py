# SPDX-License-Identifier: Apache-2.0
"""The self tests of `farandole doctor`: every collective on every backend, with known answers.

Each backend's test is a collective function that yields findings; all ranks run the same tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from farandole.errors import counted
from farandole.installed import cards
from farandole.tools.doctor_checks import Finding, Level

_SIZES = {"rides along": 10, "one block": 10_000, "many blocks": 1_000_000}  # float32 elements


@dataclass(frozen=True)
class _Arrays:
    """A self test's arrays: copies a NumPy array to the device and back."""

    put: Callable[[np.ndarray[Any, Any]], Any]
    get: Callable[[Any], np.ndarray[Any, Any]]


def _shm_backend(timeout: float) -> Iterator[Finding]:
    """CPU tensors: shared memory inside a host, the wire between hosts."""
    yield from _self_test("CPU", _Arrays(np.asarray, np.asarray), timeout)


def _gpu_backend(timeout: float) -> Iterator[Finding]:
    """Tensors on GPUs, if all ranks have one and a library with arrays on it."""
    import farandole as fd

    arrays = _on_gpu(fd.local_rank())
    able = fd.allgather_object(arrays is not None, name="doctor.gpus")
    if arrays is not None and all(able):
        yield from _self_test("GPU", arrays, timeout)
    elif any(able):
        without = [rank for rank, yes in enumerate(able) if not yes]
        text = f"left out: ranks {without} have no GPU that torch or CuPy can use"
        yield Finding("self test, GPU", Level.WARNING, text, "see the lines about CUDA")


def _on_gpu(local_rank: int) -> _Arrays | None:
    """Arrays of torch or CuPy on this rank's GPU; None without a GPU."""
    if cards() == 0:
        return None
    try:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
            return _Arrays(lambda x: torch.from_numpy(x).cuda(), lambda x: x.cpu().numpy())
    except ImportError:
        pass
    try:
        import cupy
    except ImportError:
        return None
    cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    return _Arrays(cupy.asarray, cupy.asnumpy)


def _self_test(where: str, arrays: _Arrays, timeout: float) -> Iterator[Finding]:
    """Runs every collective and compares with the known answer."""
    import farandole as fd

    put, get = arrays.put, arrays.get

    def call(what: str) -> dict[str, Any]:
        return {"name": f"doctor.{where}.{what}", "timeout": timeout}

    rank, size = fd.rank(), fd.size()
    everyone = np.arange(size)
    wrong = []
    start = time.perf_counter()
    for label, n in _SIZES.items():
        x = np.full(n, rank + 1, np.float32)
        total = fd.allreduce(put(x), op=fd.Sum, **call(f"sum.{n}"))
        if not (get(total) == size * (size + 1) / 2).all():
            wrong.append(f"allreduce ({label})")
    row = np.full((1, 3), rank, np.int64)
    if get(fd.allgather(put(row), **call("gather")))[:, 0].tolist() != [*everyone]:
        wrong.append("allgather")
    if get(fd.broadcast(put(row), size - 1, **call("broadcast")))[0, 0] != size - 1:
        wrong.append("broadcast")
    part = fd.reducescatter(put(np.arange(size)), op=fd.Sum, **call("scatter"))
    if get(part).tolist() != [rank * size]:
        wrong.append("reducescatter")
    swapped, _ = fd.alltoall_async(put(everyone + size * rank), **call("alltoall")).wait()
    if get(swapped).tolist() != (everyone * size + rank).tolist():
        wrong.append("alltoall")
    fd.barrier(timeout=timeout)
    ms = (time.perf_counter() - start) * 1e3
    name = f"self test, {where}"
    if wrong:
        remedy = "do not train here; please report this with the whole table"
        yield Finding(name, Level.ERROR, f"wrong results: {', '.join(wrong)}", remedy)
    elif ms > timeout * 1e3:
        text = f"right, but it took {ms:.0f} ms"
        yield Finding(name, Level.WARNING, text, "see the lines about cores")
    else:
        yield Finding(name, Level.OK, f"all collectives right on {counted(size, 'rank')}")


BACKENDS: list[Callable[[float], Iterator[Finding]]] = [_shm_backend, _gpu_backend]
