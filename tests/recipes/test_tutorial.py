# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md: its programs print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from harness.mpirun import mpirun

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.M | re.S)
SECONDS = 120


def _promised(command: str) -> list[int]:
    """The percentages that the page shows below this command."""
    (shown,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)^```", TUTORIAL, re.M | re.S)
    return _percentages(shown)


def _percentages(text: str) -> list[int]:
    found = re.findall(r"^epoch (\d): (\d+)% of the test images are right$", text, re.M)
    assert [epoch for epoch, _ in found] == list("01234"), text
    return [int(percent) for _, percent in found]


def _are_near(found: list[int], promised: list[int]) -> bool:
    """Other processors round differently."""
    return all(abs(a - b) <= 3 for a, b in zip(found, promised, strict=True))


def test_one_process(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(PROGRAMS[0])
    command = [sys.executable, "one.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert _are_near(_percentages(done.stdout), _promised("python one.py"))


def test_many_processes(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAMS[1])
    for ranks in (2, 3):
        promised = _promised(f"farandole run -np {ranks} python train.py")
        result = mpirun([sys.executable, str(program)], ranks, timeout=SECONDS).check()
        assert _are_near(_percentages(result.out), promised), result.out
