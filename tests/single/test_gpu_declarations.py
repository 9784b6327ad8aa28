# SPDX-License-Identifier: Apache-2.0
"""Our declarations of CUDA, NVRTC and NCCL agree with NVIDIA's headers, where those are at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(numpy.__file__).resolve().parents[1]  # where wheels are installed


def include_folders(header: str) -> list[Path]:
    """Folders of NVIDIA's wheels and of a CUDA toolkit that hold a header."""
    found = [path.parent for path in sorted((SITE / "nvidia").glob(f"*/include/{header}"))]
    toolkit = Path("/usr/local/cuda/include")
    return found + [toolkit] * (toolkit / header).exists()


@pytest.mark.parametrize(
    ("source", "headers", "wheels"),
    [
        ("cuda.cc", ("cuda.h", "nvrtc.h"), "nvidia-cuda-runtime nvidia-cuda-nvrtc"),
        ("nccl.cc", ("nccl.h",), "nvidia-nccl-cu13 (or -cu12)"),
    ],
)
def test_declarations(source: str, headers: tuple[str, ...], wheels: str) -> None:
    folders = [folder for header in headers for folder in include_folders(header)[:1]]
    compiler = shutil.which("g++")
    if compiler is None or len(folders) < len(headers):
        pytest.skip(f"needs g++ and {', '.join(headers)}: pip install {wheels}")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    tests = ROOT / "tests" / "csrc"
    command += [f"-I{tests}", f"-I{tests / 'declarations' / 'runtime'}"]
    command += [f"-isystem{folder}" for folder in folders]
    command.append(str(tests / "declarations" / source))
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
