# SPDX-License-Identifier: Apache-2.0
"""The examples that learn digits do what their head comments say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.mpirun import mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(ranks: int, *arguments: str, program: str = "torch_digits.py") -> tuple[str, float]:
    """The output and the accuracy in its last line but one."""
    result = mpirun([sys.executable, str(EXAMPLES / program), *arguments], ranks, timeout=150)
    assert result.returncode == 0, result.out
    ending = r"^test accuracy (0\.\d{4})\nparameters identical on all ranks: yes$"
    found = re.search(ending, result.out, re.MULTILINE)  # the progress bar comes mixed in
    assert found, result.out
    return result.out, float(found[1])


def test_reaches_its_accuracy_and_resumes_alone(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "digits.pt")]
    _, accuracy = run(2, *checkpoint)
    assert accuracy >= 0.97
    output, accuracy = run(1, "--resume", "--epochs", "17", *checkpoint)
    assert re.findall(r"epoch +(\d+)  loss", output) == ["15", "16"]
    assert accuracy >= 0.97


def test_uneven_data() -> None:
    output, accuracy = run(3, program="torch_uneven.py")
    assert accuracy >= 0.93
    assert output.count("rank 2 had the most") == 12


def test_clipping_is_as_in_one_process() -> None:
    result = mpirun([sys.executable, str(EXAMPLES / "torch_clipping.py")], 2, timeout=150)
    assert result.returncode == 0, result.out
    assert "parameters identical on all ranks: yes" in result.out
    assert "equal to one process with all data: yes" in result.out


def test_tensor_parallel() -> None:
    result = mpirun([sys.executable, str(EXAMPLES / "torch_tensor_parallel.py")], 2, timeout=150)
    assert result.returncode == 0, result.out
    assert "the outputs equal those of the whole model: yes" in result.out


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameter_server(ranks: int) -> None:
    result = mpirun([sys.executable, str(EXAMPLES / "parameter_server.py")], ranks, timeout=150)
    assert result.returncode == 0, result.out
    found = re.search(r"^digits: test accuracy ([\d.]+)\nratings: RMSE ([\d.]+),", result.out, re.M)
    assert found, result.out
    assert float(found[1]) >= 0.94
    assert float(found[2]) <= 0.12
