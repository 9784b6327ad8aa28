# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_first_minutes.py passes on the double, so a card is compared with what that says."""

import importlib.util
import sys
from pathlib import Path

import pytest

from harness.proc import processes_of_sessions
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


@pytest.mark.skipif(not DOUBLE.exists(), reason="needs `make programs`")
def test_what_differs_is_named_and_counted(tmp_path):
    other = tmp_path / "tool.py"
    source = TOOL.read_text().replace('"split returns": 0', '"split returns": 5')
    other.write_text(source.replace("parents[1]", f"parents[0] / {str(ROOT)!r}"))
    command = [sys.executable, str(other), "--double", "facts-1"]
    done = ended(command)
    assert done.returncode == 1
    assert "split returns: 0, and 5 on the double" in done.stdout


# A command that takes no notice of SIGTERM, and its child in another session.
_STUBBORN = """
trap "" TERM
setsid sh -c 'echo $$ >> pids; exec sleep 1000' &
echo $$ >> pids; echo last words
wait
"""


def test_nothing_outlives_a_step_that_is_late(tmp_path):
    spec = importlib.util.spec_from_file_location("first_minutes", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.GRACE = 0.1
    pids = tmp_path / "pids"
    script = _STUBBORN.replace("pids", str(pids))
    with pytest.raises(RuntimeError, match=r"no end within 5 s \| last words"):
        tool.run(5, "sh", "-c", script)
    leaders = {int(pid) for pid in pids.read_text().split()}
    assert len(leaders) == 2
    assert not processes_of_sessions(leaders)
