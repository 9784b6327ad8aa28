# SPDX-License-Identifier: Apache-2.0
"""farandole.keras under mpirun and as an elastic job, on each backend that is installed: `make
test-keras`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.mpirun import mpirun
from harness.supervised import SupervisedJob

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 600
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "FARANDOLE_INIT_TIMEOUT": str(SECONDS),  # a pair waits for the worlds of others
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
}


@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_training(backend: str, tmp_path: Path) -> None:
    for package in ("keras", backend):
        if not find_spec(package):
            pytest.skip(f"needs {package}: make test-keras")
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    env = ENVIRONMENT | {"KERAS_BACKEND": backend, "PYTHONPATH": str(PROGRAM.parents[1])}
    result = mpirun(command, 4, env=env, timeout=SECONDS)
    assert result.returncode == 0, result.out
    for size in (1, 2, 3, 4):
        assert result.out.count(f" of {size}: all is well") == size, result.out
    with SupervisedJob(["-np", "4", "--min-np", "3"], [*command, "elastic"], env) as job:
        out = job.finish(SECONDS).check().out
    assert out.count("has gone on") >= 3, out


@pytest.mark.timeout(SECONDS + 10)
def test_a_script_that_imports_horovod() -> None:
    if not find_spec("tensorflow"):
        pytest.skip("needs TensorFlow: make test-keras")
    script = str(PROGRAM.with_name("horovod_script.py"))
    command = [sys.executable, "-m", "farandole.as_horovod", script]
    env = ENVIRONMENT | {"KERAS_BACKEND": "tensorflow"}
    result = mpirun(command, 2, env=env, timeout=SECONDS)
    assert result.returncode == 0, result.out
    assert result.out.count(": done") == 2, result.out
