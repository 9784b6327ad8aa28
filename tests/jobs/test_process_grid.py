# SPDX-License-Identifier: Apache-2.0
"""The grid example does what its head says, and says so at another number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.mpirun import mpirun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "process_grid.py"


def test_at_four_ranks() -> None:
    result = mpirun([sys.executable, str(EXAMPLE)], 4, timeout=150)
    assert result.returncode == 0, result.out
    head = EXAMPLE.read_text().split('"""')[1]
    for line in head.strip().splitlines()[-2:]:
        assert line.strip() in result.out


def test_at_another_number_of_ranks() -> None:
    result = mpirun([sys.executable, str(EXAMPLE)], 1, timeout=150)
    assert result.returncode == 1
    assert "this example is for 4 ranks, not 1" in result.out
