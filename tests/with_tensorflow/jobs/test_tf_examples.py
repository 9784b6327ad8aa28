# SPDX-License-Identifier: Apache-2.0
"""The examples with TensorFlow and Keras do what their head comments say."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.mpirun import mpirun

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="needs TensorFlow: make test-tensorflow"
)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def run(program: str, ranks: int, **variables: str) -> str:
    command = [sys.executable, str(EXAMPLES / program)]
    result = mpirun(command, ranks, env=ENVIRONMENT | variables, timeout=200)
    assert result.returncode == 0, result.out
    return result.out


@pytest.mark.parametrize("program", ["tensorflow_digits.py", "keras_digits.py"])
def test_digits(program: str) -> None:
    out = run(program, 2, KERAS_BACKEND="tensorflow")
    assert re.search(r"^test accuracy 0\.9\d\d$", out, re.MULTILINE), out
    assert "parameters identical on all ranks: yes" in out


def test_four_frameworks() -> None:
    out = run("four_frameworks.py", 4)
    told = re.findall(r"^rank (\d) trains with (\w+): accuracy ([\d.]+)$", out, re.MULTILINE)
    assert sorted(told)[0][:2] == ("0", "JAX"), out
    assert {name for _, name, _ in told} == {"JAX", "torch", "TensorFlow", "NumPy"}, out
    assert len({accuracy for *_, accuracy in told}) == 1, out
    assert float(told[0][2]) > 0.88
