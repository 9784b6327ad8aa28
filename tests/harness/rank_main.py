# SPDX-License-Identifier: Apache-2.0
"""What mpirun starts on each rank for files of tests/parallel: pytest, once a file.

Every file finds the process as new, but for what is imported: the environment is that of the start,
torch's seed is alike on all ranks, and the runtime starts again.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import pytest

from harness.inner import InStep, Step
from harness.world import ENDED

# What tests import in their midst, or torch by itself, and what takes long on a busy machine.
SLOW = ("torch._dynamo", "mpi4py.MPI")


def main(options: list[str]) -> None:
    """Run the files; once anything has failed, leave without MPI's finalize, which may wait."""
    step = Step()
    files = json.loads(Path(os.environ["FARANDOLE_TEST_FILES"]).read_text())
    for number, (path, folder) in enumerate(files.items(), 1):
        step.enter(Path(folder))
        if number == 1 < len(files) and any("torch" in Path(name).read_text() for name in files):
            for name in SLOW:
                importlib.import_module(name)
            step.meet("imported")
        environment = dict(os.environ)
        code = _run(step, path, options)
        if code == 0 and number < len(files):
            code = _renew(step, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        if any(answer != "0" for answer in step.meet(str(code))):  # all reports are written now
            os._exit(code or 1)
        if step.rank == 0:
            (step.folder / ENDED).touch()


def _run(step: Step, path: str, options: list[str]) -> int:
    """pytest's exit code; a file without a test for this world size is none of its failures."""
    own = [f"--basetemp={step.folder}/tmp-{step.rank}", "-p", "no:cacheprovider"]
    own += ["--tb=short", "--color=no", "-q", "--no-summary", "--timeout=0"]
    code = int(pytest.main([*own, *options, path], plugins=[InStep(step)]))
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


def _renew(step: Step, environment: dict[str, str]) -> int:
    """What a file has left goes, before the next one comes; 1 if that fails."""
    import farandole

    try:
        farandole.shutdown()
        gc.collect()
        os.environ.clear()
        os.environ.update(environment)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(0)
    except BaseException:
        step.tell_failure(f"between two files:\n{traceback.format_exc()}")
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
