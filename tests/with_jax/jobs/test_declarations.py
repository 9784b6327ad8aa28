# SPDX-License-Identifier: Apache-2.0
"""Our declarations of XLA's FFI agree with the header that JAX brings, and other versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make test-jax")
ROOT = Path(__file__).resolve().parents[3]


def test_a_version_of_jax_that_lacks_what_is_needed() -> None:
    program = (
        "import jax.extend.core, jax._src.effects as e\n"  # which need it themselves
        "del e.remat_allowed_effects\nimport farandole.jax"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    text = f"farandole.jax does not work with jax {jax.__version__}: "
    assert f"LibraryError: {text}" in result.stderr, result.stderr
    assert "remat_allowed_effects" in result.stderr


def test_declarations() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = ROOT / "tests" / "csrc" / "declarations" / "xla.cc"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    command += [f"-isystem{jax.ffi.include_dir()}", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
