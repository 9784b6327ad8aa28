# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_first_minutes.py passes on the double, so a card is compared with what that says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = ROOT / "build" / "release" / "tests" / "libgpu_double.so"
TOOL = ROOT / "tools" / "gpu_first_minutes.py"


@pytest.mark.skipif(not DOUBLE.exists(), reason="needs `make programs`")
@pytest.mark.parametrize("step", ["facts-1", "facts-2", "doctor-1", "doctor-2", "sanitizer"])
def test_the_double_passes(step):
    command = [sys.executable, str(TOOL), "--double", step]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[0] == step
    assert done.stdout.split()[-1] == "pass"


@pytest.mark.skipif(not DOUBLE.exists(), reason="needs `make programs`")
def test_what_differs_is_named_and_counted(tmp_path):
    other = tmp_path / "tool.py"
    source = TOOL.read_text().replace('"split returns": 0', '"split returns": 5')
    other.write_text(source.replace("parents[1]", f"parents[0] / {str(ROOT)!r}"))
    command = [sys.executable, str(other), "--double", "facts-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "split returns: 0, and 5 on the double" in done.stdout
