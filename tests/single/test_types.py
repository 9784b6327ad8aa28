# SPDX-License-Identifier: Apache-2.0
"""Type checkers find farandole where it is installed, in development too, and see the types that a
user's program expects; these are the types that it gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "typing" / "program.py"
# Where a user's checker looks: the environment, and nothing of this checkout's settings.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}


def _judge(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [*command, str(PROGRAM)], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy(tmp_path: Path) -> None:
    # With the settings and the cache of `make lint`: torch is read once.
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    _judge(tmp_path, sys.executable, "-m", "mypy", *settings, *cache)


def test_pyright(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "build" / "docs" / "bin"), os.environ["PATH"]])
    pyright = shutil.which("pyright", path=path)
    if pyright is None:
        pytest.skip("needs pyright: `make docs` installs it in build/docs")
    _judge(tmp_path, pyright, "--pythonpath", sys.executable)


def test_the_program_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
