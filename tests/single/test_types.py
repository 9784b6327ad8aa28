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


Complaints = set[tuple[str, int]]  # file and line


def _mypy(folder: Path, *programs: Path) -> tuple[Complaints, str]:
    """Its complaints, and all that it says."""
    # With the settings and the cache of `make lint`: torch is read once.
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    said = _output(folder, sys.executable, "-m", "mypy", *settings, *cache, *programs)
    errors = re.findall(r"^(\S+):(\d+): error:", said, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in errors}, said


def _pyright(folder: Path, *programs: Path) -> tuple[Complaints, str]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    said = _output(folder, *command, *programs)
    found = json.loads(said)["generalDiagnostics"]
    errors = [x for x in found if x["severity"] == "error"]
    return {(Path(x["file"]).name, x["range"]["start"]["line"] + 1) for x in errors}, said


def _output(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # there are errors
    return done.stdout


@pytest.mark.parametrize("checked", [_mypy, _pyright])
def test_wrong_uses_are_errors_and_right_ones_are_none(tmp_path: Path, checked) -> None:
    programs = [PROGRAM, WRONG]
    if checked is _mypy:  # pyright has rules of its own for variables of loops
        readme = (ROOT / "README.md").read_text()
        (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        programs.append(tmp_path / "readme.py")
        programs[-1].write_text(program)
    complaints, said = checked(tmp_path, *programs)
    text = WRONG.read_text().splitlines()
    wrong = {(WRONG.name, i) for i, line in enumerate(text, 1) if line.endswith("# wrong")}
    assert complaints == wrong, said
