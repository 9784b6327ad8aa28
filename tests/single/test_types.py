# SPDX-License-Identifier: Apache-2.0
"""Type checkers find farandole where it is installed, in development too. They see the types that a
user's program expects, which are those that it gets, and the mistakes of another one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "typing" / "program.py"
WRONG = ROOT / "tests" / "typing" / "wrong.py"
# Where a user's checker looks: the environment, and nothing of this checkout's settings.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}


def _mypy(folder: Path, program: Path) -> tuple[set[int], str]:
    """The lines that it complains about, and what it says."""
    # With the settings and the cache of `make lint`: torch is read once.
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    said = _output(folder, sys.executable, "-m", "mypy", *settings, *cache, str(program))
    errors = re.findall(rf"^\S*{program.name}:(\d+): error:", said, re.MULTILINE)
    assert errors or "Success" in said, said
    return {int(line) for line in errors}, said


def _pyright(folder: Path, program: Path) -> tuple[set[int], str]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    said = _output(folder, *command, str(program))
    found = json.loads(said)["generalDiagnostics"]
    errors = [x for x in found if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1 for x in errors}, said


def _output(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: there are errors
    return done.stdout


CHECKERS = pytest.mark.parametrize("checked", [_mypy, _pyright])


@CHECKERS
def test_right_uses(tmp_path: Path, checked) -> None:
    lines, said = checked(tmp_path, PROGRAM)
    assert not lines, said


@CHECKERS
def test_wrong_uses(tmp_path: Path, checked) -> None:
    text = WRONG.read_text().splitlines()
    lines, said = checked(tmp_path, WRONG)
    assert lines == {i for i, line in enumerate(text, 1) if line.endswith("# wrong")}, said


def test_the_program_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
