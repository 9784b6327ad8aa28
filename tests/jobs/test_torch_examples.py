# SPDX-License-Identifier: Apache-2.0
"""The examples do what their head comments say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output(ranks: int, program: str, *arguments: str) -> str:
    result = mpirun([sys.executable, str(EXAMPLES / program), *arguments], ranks, timeout=150)
    return result.check().out


def run(ranks: int, *arguments: str, program: str = "torch_digits.py") -> tuple[str, float]:
    """The output and the accuracy in its last line but one."""
    out = output(ranks, program, *arguments)
    ending = r"^test accuracy (0\.\d{4})\nparameters identical on all ranks: yes$"
    found = re.search(ending, out, re.MULTILINE)  # the progress bar comes mixed in
    assert found, out
    return out, float(found[1])


def test_reaches_its_accuracy_and_resumes_alone(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "digits.pt")]
    _, accuracy = run(2, *checkpoint)
    assert accuracy >= 0.97
    out, accuracy = run(1, "--resume", "--epochs", "17", *checkpoint)
    assert re.findall(r"epoch +(\d+)  loss", out) == ["15", "16"]
    assert accuracy >= 0.97


def test_uneven_data() -> None:
    out, accuracy = run(3, program="torch_uneven.py")
    assert accuracy >= 0.93
    assert out.count("rank 2 had the most") == 12


GRID = EXAMPLES / "process_grid.py"
SAYS: dict[str, tuple[int, list[str]]] = {
    "torch_clipping.py": (
        2,
        [
            "parameters identical on all ranks: yes",
            "equal to one process with all data: yes",
        ],
    ),
    "torch_tensor_parallel.py": (2, ["the outputs equal those of the whole model: yes"]),
    GRID.name: (4, GRID.read_text().split('"""')[1].strip().splitlines()[-2:]),
}


@pytest.mark.parametrize("program", SAYS)
def test_what_it_says(program: str) -> None:
    ranks, texts = SAYS[program]
    out = output(ranks, program)
    for text in texts:
        assert text.strip() in out


def test_a_grid_at_another_number_of_ranks() -> None:
    result = mpirun([sys.executable, str(GRID)], 1, timeout=150)
    assert result.returncode == 1
    assert "this example is for 4 ranks, not 1" in result.out


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameter_server(ranks: int) -> None:
    out = output(ranks, "parameter_server.py")
    found = re.search(r"^digits: test accuracy ([\d.]+)\nratings: RMSE ([\d.]+),", out, re.M)
    assert found, out
    assert float(found[1]) >= 0.94
    assert float(found[2]) <= 0.12
