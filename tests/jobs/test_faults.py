# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/faults print what docs/faults.md has of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.mpirun import MPI_ENVIRONMENT
from harness.process import PATIENCE, ended

ROOT = Path(__file__).resolve().parents[2]
FAULTS = sorted(path.stem for path in (ROOT / "examples" / "faults").glob("*.py"))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_page_has_what_the_program_prints(fault: str) -> None:
    command = [sys.executable, ROOT / "tools" / "faults.py", "--check", fault]
    done = ended(command, 3 * PATIENCE, **MPI_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
