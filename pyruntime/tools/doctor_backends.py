# SPDX-License-Identifier: Apache-2.0
"""The self tests of `farandole doctor`, which run every collective on every backend.

Each test is a generator of findings. It is a collective, so all ranks run the same tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from farandole.errors import counted
from farandole.installed import gpu_count
from farandole.tools.doctor_checks import Finding, Level


@dataclass(frozen=True)
class _Arrays:
    """Copies a NumPy array to a device and back."""

    put: Callable[[np.ndarray[Any, Any]], Any]
    get: Callable[[Any], np.ndarray[Any, Any]]


def _shm_backend(timeout: float) -> Iterator[Finding]:
    """Tests CPU tensors, which use shared memory within a host and the network between hosts."""
    yield from _self_test("CPU", _Arrays(np.array, np.asarray), timeout)


def _gpu_backend(timeout: float) -> Iterator[Finding]:
    """Tests GPU tensors, if every rank has a GPU and a library for arrays on GPUs."""
    import farandole as fd

    arrays = _on_gpu(fd.local_rank())
    able = fd.allgather_object(arrays is not None, name="doctor.gpus")
    if arrays is not None and all(able):
        yield from _self_test("GPU", arrays, timeout)
    elif any(able):
        without = [rank for rank, yes in enumerate(able) if not yes]
        text = f"skipped: ranks {without} have no GPU that torch or CuPy can use"
        yield Finding("self test, GPU", Level.WARNING, text, "see the lines about CUDA")


def _on_gpu(local_rank: int) -> _Arrays | None:
    if gpu_count() == 0:
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
    """Runs every collective that `farandole check` runs, with two dtypes."""
    import farandole as fd
    from farandole.tools.check import compared

    start, wrong = time.perf_counter(), []
    for dtype in ("float32", "int64"):
        for what, op, text in compared(dtype, timeout, where, arrays.put, arrays.get):
            wrong += [f"{what} {op} {text}"] if text else []
    ms = (time.perf_counter() - start) * 1e3
    name = f"self test, {where}"
    if wrong:
        remedy = "do not train here; please report this with the whole table"
        yield Finding(name, Level.ERROR, f"wrong results: {'; '.join(wrong[:3])}", remedy)
    elif ms > timeout * 1e3:
        text = f"right, but it took {ms:.0f} ms"
        yield Finding(name, Level.WARNING, text, "see the lines about cores")
    else:
        yield Finding(name, Level.OK, f"all collectives right on {counted(fd.size(), 'rank')}")


BACKENDS: list[Callable[[float], Iterator[Finding]]] = [_shm_backend, _gpu_backend]
