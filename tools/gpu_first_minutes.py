# SPDX-License-Identifier: Apache-2.0
"""The first minutes on a card, under ten: what NCCL and CUDA do there, beside what the double says.

    python tools/gpu_first_minutes.py [--double] [STEP ...]

Steps run in order, each in processes of its own with a limit, and print `pass`, the first thing
that differs, or `needs` and what they lack; the next one runs in any case. Ranks share the card
where there is only one, each with an NCCL_HOSTID of its own. --double runs the same steps on the
test double: of tests that need a card, those that show the same there. The exit code is the number
of steps that have failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import gpu  # noqa: E402
from harness.mpirun import MPI_ENVIRONMENT, find_mpirun  # noqa: E402
from harness.process import JobError  # noqa: E402

DOUBLE = ROOT / "build" / "release" / "tests" / "libgpu_double.so"
LIBRARIES = ("CUDA", "NCCL", "NVRTC")

# What tests/csrc/lib/gpu/gpu_double says, by ranks; read in NCCL 2.28.9. "alone": before others.
FACTS = {
    1: {
        "init returns": 7,
        "group_end returns": 0,
        "state after group_end": 0,
        "the second group_end returns": 0,
        "window_register returns": 0,
        "split returns": 0,
        "part when the split is done": True,
    },
    2: {
        "init returns": 7,
        "group_end returns": 7,
        "the second group_end returns": 7,
        "window_register returns": 0,
        "window at once, alone": False,
        "state after window_register, alone": 7,
        "a second window_register, alone": 4,
        "split returns": 0,
        "part at once, alone": False,
        "state after split, alone": 7,
        "part when the split is done": True,
    },
}


# Many small tensors that begin at odd addresses, packed, tripled and unpacked by our kernel; what
# lies between them stays as it is.
ODD = """
import torch, farandole.torch as hvd
if {double}:
    from harness.torch_on_double import pretend
    pretend()
hvd.init()
for dtype in (torch.uint8, torch.bfloat16, torch.float32):
    base = torch.ones(9000, device="cpu" if {double} else "cuda").to(dtype)
    expected = base.clone()
    for whole in (base, expected):
        parts = [whole[i * 100 + i % 7 + 1 : i * 100 + 90] for i in range(80)]
        if whole is base:
            hvd.grouped_allreduce_(parts, op=hvd.Sum, postscale_factor=3.0, name=str(dtype))
        else:
            for part in parts:
                part.mul_(3)
    assert torch.equal(base, expected), dtype
hvd.shutdown()
"""

# Ranks that share a card if they must, as those of tests/gpu.
DOCTOR = """
import os, sys
from harness import gpu
gpu.share(int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))))
from farandole.tools.cli import main
sys.exit(main(["doctor", "--all"]))
"""


class Needs(Exception):
    """What a step lacks here."""


def facts(size: int) -> dict[str, str]:
    """What rank 0 of `size` has seen; raises RuntimeError where a rank has failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "tools" / "gpu_facts.py")]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "NCCL_HOSTID": f"first-{rank}", "GPU_DOUBLE_FOLDER": folder},
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=90)[0] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            raise RuntimeError(f"rank {rank}: {said[rank].strip()[-300:]}")
    return dict(line.split("=", 1) for line in said[0].splitlines() if "=" in line)


def _check_facts(size: int) -> str:
    """The first that differs from the double, or nothing."""
    found = facts(size)
    for name, expected in FACTS[size].items():
        if found.get(name) != repr(expected):
            return f"{name}: {found.get(name)}, and {expected!r} on the double"
    return ""


def _run(limit: int, *command: str, **environment: str) -> str:
    """What a command writes; raises RuntimeError with the last words of one that fails."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        of_double = {"FARANDOLE_TEST_FOLDER": folder, "GPU_DOUBLE_FOLDER": folder}
        env = {**os.environ, **MPI_ENVIRONMENT, **of_double, "PYTHONPATH": path, **environment}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=env
            )
        except subprocess.TimeoutExpired as late:
            words = (late.stdout or b"").decode(errors="replace").strip().splitlines()
            raise RuntimeError(" | ".join([f"no end within {limit} s", *words[-3:]])) from late
    text = done.stdout + done.stderr
    words = text.strip().splitlines()
    failed = [line for line in words if line.startswith(("FAILED", "ERROR", "E  "))] or words[-3:]
    if done.returncode != 0:
        raise RuntimeError(" | ".join(failed[:3]) or f"code {done.returncode}")
    return text


def _tests(limit: int, path: str, ranks: int, chosen: str = "") -> str:
    """Tests of a file; `chosen` as pytest's -k. Where all are skipped Needs says why."""
    python = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    inner = [f"--inner=-k '{chosen}'"] if chosen else []
    text = _run(limit, *python, path, "--ranks", str(ranks), *inner)
    found = re.search(r"^(\d+) tests passed on all ranks", text, re.MULTILINE)
    if found and int(found[1]) > 0:
        return ""
    skipped = re.search(r"^SKIPPED.*?: (.*)$", text, re.MULTILINE)
    raise Needs(skipped[1].removeprefix("needs ") if skipped else f"a test that {path} has not")


def _doctor(ranks: int, double: bool) -> str:
    """Its first row about GPUs that is not well. The double has no arrays for the self test."""
    command = [find_mpirun(), "-n", str(ranks)] if ranks > 1 else []
    text = _run(90, *command, sys.executable, "-c", DOCTOR, **gpu.environment())
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # under mpirun it has colours
    for row in ("CUDA", "NVRTC", "NCCL", *([] if double else ["self test, GPU"])):
        if not re.search(rf"^ok\W+{row}\b", text, re.MULTILINE):
            found = re.search(rf"^.*\b{row}\b.*$", text, re.MULTILINE)
            return found[0] if found else f"it says nothing of {row}"
    return ""


def _sanitizer(double: bool) -> str:
    command = [sys.executable, "-c", ODD.format(double=double)]
    if double:
        _run(90, *command)
        return ""
    if reason := gpu.why_not():
        raise Needs(reason.removeprefix("needs "))
    if not shutil.which("compute-sanitizer"):
        _run(90, *command)
        raise Needs("compute-sanitizer, of CUDA's toolkit; without it the results are right")
    _run(90, "compute-sanitizer", "--error-exitcode", "9", *command)
    return ""


def _steps(double: bool) -> dict[str, Callable[[], str]]:
    """Every step's name, and what runs it: an empty text is a pass."""
    files = {  # on a card, and on the double
        "collectives": ("gpu/test_collectives.py", "parallel/test_gpu_table.py"),
        "streams": ("gpu/test_streams.py", "parallel/test_gpu_arrays.py"),
        "sets": ("gpu/test_collectives.py", "parallel/test_gpu_bucket_view.py"),
        "windows": ("gpu/test_bucket_view.py", "parallel/test_gpu_bucket_view.py"),
        "capture": ("gpu/test_torch_adapter.py", "parallel/test_gpu_torch.py"),
    }
    steps: dict[str, Callable[[], str]] = {}

    def tests(name: str, ranks: int, chosen: str = "") -> Callable[[], str]:
        path = f"tests/{files[name][double]}"
        return lambda: _tests(90, path, ranks, chosen)

    for size in FACTS:
        steps[f"facts-{size}"] = lambda size=size: _check_facts(size)
    for size in (1, 2):
        steps[f"doctor-{size}"] = lambda size=size: _doctor(size, double)
    for size in (1, 2):
        steps[f"collectives-{size}"] = tests("collectives", size)
    steps["streams"] = tests("streams", 2, "streams or handle or repeat" if double else "")
    steps["sets"] = tests("sets", 4, "process_sets")
    steps["windows"] = tests("windows", 2)
    steps["sanitizer"] = lambda: _sanitizer(double)
    steps["capture"] = tests("capture", 2, "graph_repeats or held_up")
    return steps


def main() -> int:
    """Runs the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--double", action="store_true", help="on the test double")
    parser.add_argument("steps", nargs="*", metavar="STEP")
    asked = parser.parse_args()
    if asked.double:
        os.environ.update({f"FARANDOLE_{name}_LIBRARY": str(DOUBLE) for name in LIBRARIES})
        if not DOUBLE.exists():
            parser.error(f"there is no {DOUBLE}: make programs")
    steps, failed = _steps(asked.double), 0
    if unknown := set(asked.steps) - set(steps):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    for name in asked.steps or steps:
        begun = time.monotonic()
        try:
            found = steps[name]()
            failed += bool(found)
        except Needs as lack:
            found = f"needs {lack}"
        except (RuntimeError, OSError, JobError, subprocess.SubprocessError) as error:
            found = str(error) or type(error).__name__
            failed += 1
        print(f"{name:14} {time.monotonic() - begun:5.1f} s  {found or 'pass'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
