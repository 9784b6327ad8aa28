# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_first_minutes.py passes on the double, so a card is compared with what that says."""

import sys
from pathlib import Path

import pytest

from harness.process import ended

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = ROOT / "build" / "release" / "tests" / "libgpu_double.so"
TOOL = ROOT / "tools" / "gpu_first_minutes.py"


@pytest.mark.skipif(not DOUBLE.exists(), reason="needs `make programs`")
@pytest.mark.parametrize("step", ["doctor", "sanitizer", "collectives", "facts-1", "facts-2"])
def test_the_double_passes(step):
    command = [sys.executable, str(TOOL), "--double", step]
    done = ended(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[0] == step
    assert done.stdout.split()[-1] == "pass"
