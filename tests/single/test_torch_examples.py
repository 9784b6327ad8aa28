# SPDX-License-Identifier: Apache-2.0
"""The torch examples do what their head comments say."""

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_reaches_its_accuracy(ranks: int, tmp_path: Path) -> None:
    _, accuracy = run(ranks, "--checkpoint", str(tmp_path / "digits.pt"))
    assert accuracy >= 0.97


def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "digits.pt")]
    run(1, "--epochs", "1", *checkpoint)
    output, _ = run(2, "--resume", "--epochs", "3", *checkpoint)
    assert re.findall(r"epoch +(\d+)  loss", output) == ["1", "2"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uneven_data(ranks: int) -> None:
    output, accuracy = run(ranks, program="torch_uneven.py")
    assert accuracy >= 0.93
    assert output.count(f"rank {ranks - 1} had the most") == 12
