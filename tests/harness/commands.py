# SPDX-License-Identifier: Apache-2.0
"""The command `farandole`, and what tests need of the machine."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mpirun import find_mpirun
from harness.process import PATIENCE, ended

__all__ = ["farandole", "mpi_version", "needs_root"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


def farandole(*words: object, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    """Exit code and output of `farandole` with these words; `env`: variables beside our own."""
    done = ended([sys.executable, "-m", "farandole", *map(str, words)], PATIENCE, cwd, **env)
    return done.returncode, done.stdout + done.stderr


@functools.cache
def mpi_version() -> str:
    """What mpirun says of itself: `mpirun (Open MPI) 5.0.8` and so on."""
    return subprocess.check_output([find_mpirun(), "--version"], text=True)
