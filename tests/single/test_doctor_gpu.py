# SPDX-License-Identifier: Apache-2.0
"""What `farandole doctor` says about GPUs: with none, with the test double, with less."""

import sys
from pathlib import Path

import pytest

from harness.process import ended

DOUBLE = Path(__file__).resolve().parents[2] / "build" / "release" / "tests" / "libgpu_double.so"
LIBRARIES = {f"FARANDOLE_{name}_LIBRARY": str(DOUBLE) for name in ("CUDA", "NCCL", "NVRTC")}
NO_DRIVER = {"FARANDOLE_CUDA_LIBRARY": "/no/such/folder/libcuda.so.1"}
LOOK = """
from farandole.tools.doctor_checks import _gpus
for finding in _gpus():
    print(finding.level.name, finding.name, finding.text, finding.remedy, sep="; ")
"""
built = pytest.mark.skipif(not DOUBLE.exists(), reason="needs `make programs`")


def output_of(source: str, environment: dict[str, str]) -> str:
    """What a fresh process prints."""
    done = ended([sys.executable, "-c", source], **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def looked(environment: dict[str, str]) -> dict[str, list[str]]:
    """Level, text and remedy by name."""
    rows = [line.split("; ") for line in output_of(LOOK, environment).splitlines()]
    return {name: [level, *rest] for level, name, *rest in rows}


@built
def test_every_library_is_named_with_its_version():
    found = looked(LIBRARIES)
    assert found["CUDA"] == ["OK", f"driver for CUDA 13.0 ({DOUBLE})", ""]
    assert found["GPU 0"] == ["OK", "double 0, compute capability 9.0", ""]
    assert found["NVRTC"] == ["OK", f"13.0 ({DOUBLE})", ""]
    assert found["NCCL"] == ["OK", f"2.29.7 ({DOUBLE})", ""]


@built
@pytest.mark.parametrize(
    ("environment", "answers"), [(LIBRARIES, "22907 True"), (NO_DRIVER, "0 False")]
)
def test_scripts_that_ask_what_was_built(environment, answers):
    """Horovod's questions, answered by what is found at run time."""
    source = "import farandole as fd; print(fd.nccl_built(), fd.cuda_built())"
    assert output_of(source, environment).strip() == answers


@built
def test_what_is_missing_comes_with_a_remedy():
    nowhere = "/no/such/folder/library.so"
    found = looked(
        {**LIBRARIES, "FARANDOLE_NCCL_LIBRARY": nowhere, "FARANDOLE_NVRTC_LIBRARY": nowhere}
    )
    level, text, remedy = found["NCCL"]
    assert (level, text) == ("WARNING", "not found: GPU tensors travel through host memory")
    assert "pip install -U nvidia-nccl-cu13" in remedy
    level, text, remedy = found["NVRTC"]
    assert (level, text) == ("ERROR", "not found: farandole cannot compile its GPU kernel")
    assert "pip install nvidia-cuda-nvrtc" in remedy


def test_no_driver_and_no_card_is_no_fault():
    found = looked(NO_DRIVER)
    assert list(found) == ["CUDA"]
    has_nodes = any(Path("/dev").glob("nvidia[0-9]*"))
    assert found["CUDA"][0] == ("ERROR" if has_nodes else "OK")
