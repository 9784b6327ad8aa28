# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine: whether there are any, and ranks that share one through all of NCCL.

`python -m harness.gpu` says which there are, and ends with 1 where there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

__all__ = ["LOOPBACK", "describe", "environment", "need", "share", "waits", "why_not"]

# Seconds for which a process has a card to itself where several take turns: NVIDIA's default. No
# card has been asked.
_SLICE = 0.002
# Collectives of NCCL in the longest test of tests/gpu, and in the longest file.
_OF_TEST, _OF_FILE = 200, 4000
# NCCL's links between ranks that it takes for ranks of several hosts.
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@functools.cache
def _driver() -> tuple[Any, int]:
    """libcuda, or None, and how many GPUs it shows. Makes no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return cuda, 0
    return cuda, count.value


def why_not() -> str:
    """Why no test can use a GPU here; empty: they can."""
    cuda, count = _driver()
    if cuda is None:
        return "needs an NVIDIA GPU: no libcuda.so.1 here"
    return "" if count > 0 else "needs an NVIDIA GPU: the driver shows none"


def need() -> None:
    """Skips the test that calls it where there is no GPU."""
    if reason := why_not():
        pytest.skip(reason)


def share(rank: int) -> None:
    """Gives this rank a GPU, as its device 0; ranks take turns where there are more of them.

    Sets the variables with which NCCL accepts ranks on one GPU: it takes them for other hosts, and
    links them by sockets on loopback. Slow, but all of its code. Before CUDA is used.
    """
    devices = os.environ.get("FARANDOLE_TEST_GPUS", "0").split(",")
    turn, device = divmod(rank, len(devices))
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[device]
    os.environ["FARANDOLE_SHARED_GPU"] = "nccl"
    os.environ["NCCL_HOSTID"] = f"farandole-{turn}"
    os.environ.update(LOOPBACK)


def environment() -> dict[str, str]:
    """What share() must know in the ranks: the devices that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"FARANDOLE_TEST_GPUS": visible or ",".join(map(str, range(_driver()[1])))}


def waits(ranks: int) -> tuple[float, float]:
    """Seconds that ranks may wait for turns on cards that they share: in one test, in a file.

    Without MPS a card runs one process at a time. A kernel of NCCL that waits for a peer spins
    until its slice ends, so each of a ring's 2 * (ranks - 1) steps takes a slice of every process.
    With MPS the kernels of all processes run at once: no step waits for a turn.
    """
    turns = -(-ranks // len(environment()["FARANDOLE_TEST_GPUS"].split(",")))
    if turns == 1 or _has_mps():
        return 0.0, 0.0
    each = 2 * (ranks - 1) * turns * _SLICE
    return _OF_TEST * each, _OF_FILE * each


def _has_mps() -> bool:
    """Whether NVIDIA's Multi-Process Service runs: its control daemon has a pipe in this folder."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def describe() -> dict[str, str]:
    """What results depend on: the card, the driver and the versions installed."""
    cuda, count = _driver()
    found = {"python": platform.python_version(), "machine": f"{os.cpu_count()} cores"}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if count > 0:
        name, version = ctypes.create_string_buffer(100), ctypes.c_int(0)
        cuda.cuDeviceGetName(name, len(name), 0)
        cuda.cuDriverGetVersion(ctypes.byref(version))
        found["GPU"] = f"{count} x {name.value.decode()}"
        found["processes on one GPU"] = "at once, by MPS" if _has_mps() else "in turns, time slices"
        found["driver"] = f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        with contextlib.suppress(OSError):
            found["driver"] += ", " + Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    return found


def main() -> int:
    """Prints describe(), or why not."""
    if reason := why_not():
        print(reason)
        return 1
    for name, value in describe().items():
        print(f"# {name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
