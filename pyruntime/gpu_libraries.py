# SPDX-License-Identifier: Apache-2.0
"""The libraries for GPUs as the core finds them, looked at from Python: files, versions, cards."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.config import config
from farandole.installed import nvidia_folders

__all__ = ["cards", "mapped", "nccl_version", "number_of", "open_library"]


def open_library(setting: str, names: Sequence[str]) -> tuple[Any, str]:
    """(the library, its file): the setting's, else what this process holds, NVIDIA's wheels', the
    loader's; (None, "") where there is none."""
    chosen = {variable.name: variable.value for variable in config()}[setting]
    paths = [Path(folder, name) for name in names for folder in nvidia_folders()]
    places = [chosen] if chosen else [*(str(p) for p in paths if p.exists()), *names]
    for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
        for place in places:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(place, mode), _file_of(Path(place).name.split(".so")[0])
    return None, ""


def mapped(name: str) -> list[str]:
    """Files called name.so... that this process holds."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/{name}.so" in line}
    return sorted(paths)


def _file_of(name: str) -> str:
    return ", ".join(mapped(name)) or name


def number_of(function: Any) -> int:
    """What `int function(int*)` writes; 0 where it fails."""
    number = ctypes.c_int(0)
    return number.value if function(ctypes.byref(number)) == 0 else 0


def cards() -> int:
    """How many GPUs this process can use."""
    cuda, _ = open_library("FARANDOLE_CUDA_LIBRARY", ["libcuda.so.1"])
    if cuda is None or cuda.cuInit(0) != 0:
        return 0
    device = ctypes.c_int(0)
    known = (cuda.cuDeviceGet(ctypes.byref(device), i) == 0 for i in itertools.count())
    return sum(itertools.takewhile(bool, known))


def nccl_version() -> int:
    """NCCL's version code, 22707 for 2.27.7; 0 where there is none."""
    nccl, _ = open_library("FARANDOLE_NCCL_LIBRARY", ["libnccl.so.2"])
    return number_of(nccl.ncclGetVersion) if nccl is not None else 0
