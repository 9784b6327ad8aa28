# SPDX-License-Identifier: Apache-2.0
"""The first seed of every random suite. It is drawn from the commit, so that CI tries new examples
with each one. `make ... SEED=n` repeats a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["SEED"]

_NAME = "FARANDOLE_TEST_SEED"


def _of_commit() -> str:
    """As a decimal number; 0 where there is no repository."""
    command = ["git", "rev-parse", "--verify", "-q", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "0"
    return str(int(done.stdout[:7] or "0", 16))


# Processes that a test starts have the same seed, also where they see no repository.
os.environ[_NAME] = os.environ.get(_NAME) or _of_commit()
SEED = int(os.environ[_NAME])
