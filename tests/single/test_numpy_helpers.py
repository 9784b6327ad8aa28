# SPDX-License-Identifier: Apache-2.0
"""The example of farandole.numpy prints what its head says. Its helpers: tests/parallel."""

import re
import sys
from pathlib import Path

import pytest

from harness.mpirun import MpiJob

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "numpy_regression.py"


@pytest.mark.parametrize("ranks", [1, 3])
def test_example(ranks):
    expected = re.findall(r"^    (loss \d.*|weights .*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert len(expected) == 2
    with MpiJob([sys.executable, str(EXAMPLE)], ranks) as job:
        lines = job.finish(timeout=60).check().out.split("\n")
    assert [line for line in lines if line.startswith(("loss", "weights"))] == expected
