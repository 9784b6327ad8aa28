# SPDX-License-Identifier: Apache-2.0
"""What mpirun starts on each rank for a file of tests/parallel: pytest, with a log of its own."""

from __future__ import annotations

import os
import sys

import pytest

from harness.inner import InStep, Step


def main(arguments: list[str]) -> None:
    """Run pytest; if anything failed, leave without MPI's finalize, which may wait for others."""
    step = Step()
    log = os.open(step.folder / f"rank-{step.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = [f"--basetemp={step.folder}/tmp-{step.rank}", "-p", "no:cacheprovider"]
    options += ["--tb=short", "--color=no", "-q", "--no-summary", "--timeout=0", *arguments]
    code = int(pytest.main(options, plugins=[InStep(step)]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        code = 0
    if any(answer != "0" for answer in step.meet(str(code))):  # all reports are written now
        os._exit(code or 1)


if __name__ == "__main__":
    main(sys.argv[1:])
