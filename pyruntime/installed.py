# SPDX-License-Identifier: Apache-2.0
"""What is installed beside farandole, for `farandole check` and `farandole doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from farandole.start.bootstrap import promised_ranks

__all__ = ["mpi_library", "nvidia_folders", "version"]


def version(package: str) -> str:
    """A package's version; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def mpi_library() -> str:
    """What the MPI that mpi4py loads calls itself. Raises ImportError or RuntimeError without one.

    Starts no MPI job where no launcher has begun one: this is a look only.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules and promised_ranks() <= 1:
        mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI.Get_library_version().split("\n")[0].split("\x00")[0]


def nvidia_folders() -> list[str]:
    """Where NVIDIA's wheels have their libraries, if they are installed."""
    found = importlib.util.find_spec("nvidia")
    places = (found and found.submodule_search_locations) or ()
    return [str(path) for place in places for path in sorted(Path(place).glob("*/lib"))]
