# SPDX-License-Identifier: Apache-2.0
"""Finds packages, MPI and GPU libraries in the places where the core looks for them. Used by
`farandole doctor`, init() and Horovod's queries."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole._library import lib, read_string
from farandole.config import setting
from farandole.start.launchers import promised_ranks
from farandole.trust import safe_working_folder

# Packages that are in other folders in an editable install.
_PARTS = ("torch", "numpy", "cupy", "jax", "keras", "tensorflow", "c10d", "extras")


def own_folders() -> list[str]:
    """Returns the folders that contain farandole's modules."""
    found = [importlib.util.find_spec(f"farandole.{part}") for part in _PARTS]
    places = [spec.submodule_search_locations or [] for spec in found if spec]
    return [str(Path(__file__).parent), *(folder for place in places for folder in place)]


def version(package: str) -> str:
    """Returns the version of a package, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def needs(module: str, adapter: str, name: str, remedy: str) -> Iterator[None]:
    """Context manager for an adapter's imports. If the library is missing, its error names the
    remedy."""
    try:
        yield
    except ModuleNotFoundError as reason:
        if reason.name != module:
            raise  # the library itself lacks a module
        text = f"{adapter} needs {name}, which is not installed: `{remedy}`"
        raise ImportError(text) from reason


@dataclass(frozen=True)
class LoadedMpi:
    """The MPI library that this process has loaded."""

    file: str
    # The MPI implementation whose ABI the library has, or "" if the core does not know the ABI.
    interface: str
    version: str


def loaded_mpi() -> LoadedMpi | None:
    """Returns the MPI library that is loaded in this process, or None if the core found none."""
    lines = read_string(lib.farandole_mpi).split("\n")
    return LoadedMpi(*lines) if len(lines) > 1 else None


def addresses() -> list[tuple[str, str]]:
    """Returns a pair (interface, address) for each address that the core announces to other hosts.

    Raises ValueError if FARANDOLE_INTERFACE excludes every address.
    """
    lines = read_string(lib.farandole_addresses).splitlines()
    return [(name, address) for name, address in (line.split(" ") for line in lines)]


def mpi_library() -> str:
    """Returns the version text of the MPI that mpi4py loads. Raises ImportError or RuntimeError.

    Initialises MPI only if a launcher has started this process.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and promised_ranks() <= 1:
        mpi4py.rc.initialize = False
    with safe_working_folder():
        from mpi4py import MPI

    return MPI.Get_library_version().split("\n")[0].split("\x00")[0]


def nvidia_folders() -> list[str]:
    """Returns the library folders of those NVIDIA wheels that are installed."""
    found = importlib.util.find_spec("nvidia")
    places = (found and found.submodule_search_locations) or ()
    return [str(path) for place in places for path in sorted(Path(place).glob("*/lib"))]


def open_library(variable: str, names: Sequence[str]) -> tuple[Any, str]:
    """Opens a library. Returns the library and its file, or (None, "") if none can be opened.

    `variable` names the setting that holds the library's path. If the setting is empty, tries in
    this order the library that this process has loaded, NVIDIA's wheels, and the dynamic loader's
    path.
    """
    chosen = setting(variable)
    paths = [Path(folder, name) for name in names for folder in nvidia_folders()]
    places = [chosen] if chosen else [*(str(p) for p in paths if p.exists()), *names]
    for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
        for place in places:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(place, mode), _file_of(Path(place).name.split(".so")[0])
    return None, ""


def mapped_files(name: str) -> list[str]:
    """Returns the files named NAME.so* that are mapped into this process."""
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/{name}.so" in line}
    return sorted(paths)


def _file_of(name: str) -> str:
    return ", ".join(mapped_files(name)) or name


def int_from(function: Any) -> int:
    """Returns the int that a C function `int f(int*)` writes, or 0 if the function fails."""
    number = ctypes.c_int(0)
    return number.value if function(ctypes.byref(number)) == 0 else 0


def gpu_count() -> int:
    """Returns the number of GPUs that this process can use."""
    cuda, _ = open_library("FARANDOLE_CUDA_LIBRARY", ["libcuda.so.1"])
    if cuda is None or cuda.cuInit(0) != 0:
        return 0
    device = ctypes.c_int(0)
    known = (cuda.cuDeviceGet(ctypes.byref(device), i) == 0 for i in itertools.count())
    return sum(itertools.takewhile(bool, known))


def nccl_version() -> int:
    """Returns NCCL's version code, such as 22707 for 2.27.7, or 0 if there is no NCCL."""
    nccl, _ = open_library("FARANDOLE_NCCL_LIBRARY", ["libnccl.so.2"])
    return int_from(nccl.ncclGetVersion) if nccl is not None else 0
