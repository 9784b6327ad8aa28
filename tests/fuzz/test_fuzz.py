# SPDX-License-Identifier: Apache-2.0
"""The decoder of control messages under the fuzzer and sanitizers, briefly (long: `make fuzz`)."""

import os
import re
from pathlib import Path

from harness.process import Process
from harness.seed import SEED

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20 if os.environ.get("CI") else 5


def test_no_message_breaks_the_decoder(tmp_path):
    program = ROOT / "build" / "release" / "fuzz" / "message_fuzz"
    assert program.exists(), f"{program} is not built: make programs"
    process = Process([str(program), "--seconds", str(SECONDS), "--seed", str(SEED)], {})
    try:
        result = process.wait(10 * SECONDS)
        assert result is not None, f"hung\n{process.output}"
    finally:
        process.kill()
    assert result.returncode == 0, result.out
    runs = int(re.search(r"^(\d+) runs", result.out)[1])
    assert runs > 1000
