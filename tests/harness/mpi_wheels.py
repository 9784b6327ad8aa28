# SPDX-License-Identifier: Apache-2.0
"""MPI libraries from wheels, each in a folder of its own: in one environment they overwrite each
other. What can't be had is a skip that says why. `python -m harness.mpi_wheels` makes CI's."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MPICH, INTEL = "mpich==5.0.2", "impi-rt==2021.19.0"
_SECONDS = 500  # mpi4py is compiled in one, on a busy machine in five minutes


def pinned(name: str) -> str:
    """The requirement, at the version the tests run with."""
    lines = (ROOT / "requirements" / "run.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def unpacked(requirement: str) -> Path:
    """The prefix into which a wheel is installed, now or by an earlier test."""
    folder = _folder(requirement)
    _install(requirement, folder, (), {})
    return folder


def is_unpacked(requirement: str) -> bool:
    """Whether an earlier test did."""
    return _marker(_folder(requirement)).exists()


def mpi4py_of_the_standard_abi() -> Path:
    """The folder for PYTHONPATH of an mpi4py compiled by MPICH's mpicc_abi, whose `libmpi_abi.so.1`
    is then any MPI's: no wheel of mpi4py 4.1 has it."""
    mpich, folder = unpacked(MPICH), ROOT / "build" / "mpi" / "mpi4py-abi"
    options = ("--no-binary", "mpi4py", "--no-cache-dir")  # the cache has one for Open MPI
    # This environment's include folder, which Python's build adds, has Open MPI's mpi.h.
    flags = f"-O0 -I{mpich / 'include'}"
    environment = {"MPICC": str(mpich / "bin" / "mpicc_abi"), "CFLAGS": flags}
    _install(pinned("mpi4py"), folder, options, environment)
    return next(folder.glob("lib/python*/site-packages"))


def _folder(requirement: str) -> Path:
    return ROOT / "build" / "mpi" / requirement.partition("==")[0]


def _marker(folder: Path) -> Path:
    return folder / ".complete"


def _install(
    requirement: str, folder: Path, options: tuple[str, ...], environment: Mapping[str, str]
) -> None:
    """Installs without dependencies, in one test process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _marker(folder).exists():
            return
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pip += ["--no-deps", "--ignore-installed", "--no-warn-script-location", *options]
        done = subprocess.run(
            [*pip, "--prefix", str(folder), requirement],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            pytest.skip(f"needs {requirement} from PyPI: {done.stderr.strip().splitlines()[-1:]}")
        _marker(folder).touch()


if __name__ == "__main__":
    mpi4py_of_the_standard_abi()
