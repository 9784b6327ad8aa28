# SPDX-License-Identifier: Apache-2.0
"""The pages say what is so: their programs run as they stand, their links into the tree lead
somewhere, and their sources have lines that people can read."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from farandole.launch.commands import Srun
from farandole.launch.job import Job
from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, ended

ROOT = Path(__file__).resolve().parents[2]
ROOTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*ROOTS, *sorted((ROOT / "docs").glob("*.md"))]
MOST_COLUMNS = 120  # tables apart, whose rows are lines
README = (ROOT / "README.md").read_text()


def programs(page: str) -> list[str]:
    """The blocks of Python in a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _run_of_the_readme(program: str, folder: Path) -> str:
    """What the program prints, started as the README says."""
    (command,) = re.findall(r"^\$ (farandole run .*)$", README, re.MULTILINE)
    (folder / "train.py").write_text(program)
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = ended(command.split(), cwd=folder, **MPI_ENVIRONMENT, PATH=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr  # the first thing that a newcomer sees is no warning
    return done.stdout


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    (program,) = programs("README.md")
    assert len([line for line in program.splitlines() if line]) <= 22
    printed = _run_of_the_readme(program, tmp_path)
    found = re.fullmatch(r"2 ranks, loss (0\.\d+)\n", printed)
    assert found, printed
    assert float(found[1]) < 0.3


@pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 5), reason="needs an import"
)
def test_the_backend_of_the_readme(tmp_path: Path) -> None:
    (line,) = re.findall(r"^torch\.distributed\.init_process_group\(.*\)$", README, re.MULTILINE)
    ask = "dist.get_rank() or print(dist.get_backend(), dist.get_world_size())"
    program = f"import torch\n\n{line}\nimport torch.distributed as dist\n\n{ask}\n"
    assert _run_of_the_readme(program, tmp_path) == "farandole 2\n"


def test_programs_of_pages_run(tmp_path: Path) -> None:
    """One page after the other, each with names of its own."""
    runner = "import runpy, sys\nfor page in sys.argv[1:]: runpy.run_path(page)"
    names = ("quickstart", "recipes", "parameter-server", "tensor-parallel")
    pages = [tmp_path / f"{page}.py" for page in names]
    for page in pages:
        page.write_text("\n".join(programs(f"docs/{page.stem}.md")))
    done = ended([sys.executable, "-c", runner, *pages], 2 * PATIENCE, tmp_path)
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


@pytest.mark.parametrize("plugin", ["pmix", "pmi2"])
def test_the_command_lines_of_clusters_are_those_that_are_started(plugin: str) -> None:
    job = Job(("python", "train.py"), 8)
    started = ["srun", *Srun("srun", plugin)._arguments(job), *job.command]
    page = " ".join((ROOT / "docs" / "clusters.md").read_text().split())
    assert f"`{' '.join(started)}`" in page
