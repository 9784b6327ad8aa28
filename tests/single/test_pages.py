# SPDX-License-Identifier: Apache-2.0
"""The pages say what is so: their programs run as they stand, their links into the tree lead
somewhere, and their sources have lines that people can read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun
from harness.process import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
ROOTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*ROOTS, *sorted((ROOT / "docs").glob("*.md"))]
MOST_COLUMNS = 120


def programs(page: str) -> list[str]:
    """The blocks of Python in a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    (program,) = programs("README.md")
    assert len([line for line in program.splitlines() if line]) <= 22
    (tmp_path / "train.py").write_text(program)
    done = mpirun([sys.executable, str(tmp_path / "train.py")], 2, timeout=PATIENCE)
    assert done.returncode == 0, done.out
    found = re.search(r"^2 ranks, loss (0\.\d+)$", done.out, re.MULTILINE)
    assert found, done.out
    assert float(found[1]) < 0.3


def test_programs_of_pages_run(tmp_path: Path) -> None:
    """One page after the other, each with names of its own."""
    runner = "import runpy, sys\nfor page in sys.argv[1:]: runpy.run_path(page)"
    names = ("quickstart", "recipes", "checkpoints", "parameter-server")
    pages = [tmp_path / f"{page}.py" for page in names]
    for page in pages:
        page.write_text("\n".join(programs(f"docs/{page.stem}.md")))
    done = subprocess.run(
        [sys.executable, "-c", runner, *map(str, pages)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= MOST_COLUMNS or line.startswith("|"), f"{page.name}:{number}"


@pytest.mark.parametrize("page", ROOTS, ids=lambda page: page.name)
def test_links_of_pages_at_the_top_lead_somewhere(page: Path) -> None:
    """`make docs` follows those of docs/."""
    targets = re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (\S+)$", page.read_text(), re.MULTILINE)
    for inline, defined in targets:
        link = (inline or defined).partition("#")[0]
        assert (ROOT / link).exists(), link


def test_versions_agree() -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    assert f"\nversion: {found[1]}\n" in (ROOT / "CITATION.cff").read_text()
