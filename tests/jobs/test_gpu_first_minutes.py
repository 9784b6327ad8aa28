# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_first_minutes.py passes on the double, so a card is compared with what that says."""

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


# A command that takes no notice of SIGTERM, its child in another session, and an orphan in a third.
_STUBBORN = """
trap "" TERM
setsid sh -c 'echo $$ >> pids; exec sleep 1000' &
(setsid sh -c 'echo $$ >> pids; exec sleep 1000' >/dev/null 2>&1 &)
echo $$ >> pids; echo last words
wait
"""
# In a process of its own: it ends all that is below it.
_LATE = """
import sys
import gpu_first_minutes as tool
tool.GRACE = 0.1
tool.adopt()
tool.run(5, "sh", "-c", sys.argv[1])
"""


def test_nothing_outlives_a_step_that_is_late(tmp_path):
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", _LATE, _STUBBORN.replace("pids", str(pids))]
    done = ended(command, PYTHONPATH=str(TOOL.parent))
    assert "RuntimeError: no end within 5 s | last words" in done.stderr
    leaders = {int(pid) for pid in pids.read_text().split()}
    assert len(leaders) == 3
    assert not processes_of_sessions(leaders)
