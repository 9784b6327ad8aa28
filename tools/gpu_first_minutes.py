# SPDX-License-Identifier: Apache-2.0
"""Checks within ten minutes what farandole, NCCL and CUDA do on a new GPU machine.

    python tools/gpu_first_minutes.py [--double] [STEP ...]

Steps run in order, each in separate processes with a time limit. Each step prints `pass`, or the
first difference from the mock GPU, or `needs` and the missing thing. After a failure the next step
still runs. All steps use one rank, except the facts about two ranks; `gpu_run.sh test`, which comes
next, uses more. --double runs the same steps on the mock GPU, with tests that give the same results
there. The exit code is the number of failed steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import gpu  # noqa: E402
from harness.mpirun import MPI_ENVIRONMENT  # noqa: E402
from harness.proc import processes_of_sessions, sessions_below  # noqa: E402
from harness.process import JobError, wait_until_gone  # noqa: E402

DOUBLE = ROOT / "build" / "release" / "tests" / "libgpu_double.so"
LIBRARIES = ("CUDA", "NCCL", "NVRTC")
# Time limits in seconds. All steps together fit into ten minutes. The doctor step first imports
# torch and CuPy, which may take a minute.
LIMITS = {"doctor": 150, "sanitizer": 120, "collectives": 120, "facts-1": 60, "facts-2": 60}
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
# Ignores pytest plugins and warnings of this environment, as gpu_run.sh does.
PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
PR_SET_CHILD_SUBREAPER = 36  # of prctl

# Facts that every rank observes on the mock GPU; from the source of NCCL 2.28.9.
FACTS = {
    "init returns": 0,
    "group_end returns": 0,
    "state after group_end": 0,
    "the second group_end returns": 0,
}


# Many small tensors at odd addresses. farandole's kernels pack, triple and unpack them; the bytes
# between them must not change.
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


class Needs(Exception):
    """Names the thing that a step needs and this machine lacks."""


def adopt() -> None:
    """Makes this process the parent of all orphans among its descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _end(child: subprocess.Popen[str]) -> None:
    """Ends a command and everything that it has started: an orphan would keep the GPU.

    SIGTERM comes first, so that pytest ends its job, which runs in another session. adopt() makes
    orphans of all sessions visible here.
    """
    sessions = sessions_below(os.getpid()) - {os.getsid(0)} | {child.pid}
    for process in processes_of_sessions({child.pid}):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while processes_of_sessions(sessions) and time.monotonic() < deadline:
        time.sleep(0.05)
    wait_until_gone(sessions, kill=True)
    child.wait()


def facts(size: int) -> dict[str, str]:
    """Facts that rank 0 of `size` ranks has observed. Raises RuntimeError if a rank has failed."""
    tool, deadline = (
        str(ROOT / "tools" / "gpu_facts.py"),
        time.monotonic() + LIMITS[f"facts-{size}"],
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _start(
                *(sys.executable, tool, str(rank), str(size), folder),
                **gpu.LOOPBACK,
                NCCL_HOSTID=f"first-{rank}",
                GPU_DOUBLE_FOLDER=folder,
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=deadline - time.monotonic())[0] for rank in ranks]
        finally:
            for process in ranks:
                _end(process)
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            raise RuntimeError(f"rank {rank}: {said[rank].strip()[-300:]}")
    return dict(line.split("=", 1) for line in said[0].splitlines() if "=" in line)


def _check_facts(size: int) -> str:
    """The first fact that differs from that of the mock; "" if there is none."""
    found = facts(size)
    for name, expected in FACTS.items():
        if found.get(name) != repr(expected):
            return f"{name}: {found.get(name)}, but {expected!r} on the double"
    return ""


def run(limit: float, *command: str) -> str:
    """A command's output. If it fails or is late, raises RuntimeError with its last lines."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        of_double = {"FARANDOLE_TEST_FOLDER": folder, "GPU_DOUBLE_FOLDER": folder}
        child = _start(*command, **MPI_ENVIRONMENT, **PYTEST, **of_double, PYTHONPATH=path)
        try:
            text = child.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired as late:
            _end(child)
            words = child.communicate()[0].strip().splitlines()
            raise RuntimeError(" | ".join([f"no end within {limit:g} s", *words[-3:]])) from late
        finally:
            _end(child)
    words = text.strip().splitlines()
    marks = ("FAILED", "ERROR", "E  ", "========= Invalid")
    failed = [line for line in words if line.startswith(marks)] or words[-3:]
    if child.returncode != 0:
        raise RuntimeError(" | ".join(failed[:3]) or f"code {child.returncode}")
    return text


def _doctor(double: bool) -> str:
    """The doctor's first bad row about GPUs, or "". On the mock, there is no self test for GPUs."""
    text = run(LIMITS["doctor"], sys.executable, "-m", "farandole", "doctor", "--all")
    for row in ("CUDA", "NVRTC", "NCCL", *([] if double else ["self test, GPU"])):
        if not re.search(rf"^ok\W+{row}\b", text, re.MULTILINE):
            found = re.search(rf"^.*\b{row}\b.*$", text, re.MULTILINE)
            return found[0] if found else f"it has no row {row}"
    return ""


def _sanitizer(double: bool) -> str:
    """Runs compute-sanitizer, but only on farandole's kernels: torch's would take minutes."""
    command = [sys.executable, "-c", ODD.format(double=double)]
    if not double and (reason := gpu.why_not()):
        raise Needs(reason.removeprefix("needs "))
    there = not double and shutil.which("compute-sanitizer")
    if there:  # otherwise it would wait 10 s for CUDA, then check nothing
        options = ["--kernel-regex", "kns=farandole_", "--launch-timeout", f"{LIMITS['sanitizer']}"]
        command[:0] = [there, *options, "--error-exitcode", "9"]
    text = run(LIMITS["sanitizer"], *command)
    if not double and not there:
        raise Needs("compute-sanitizer (CUDA's toolkit). Without it, the results are right")
    return "" if double or "ERROR SUMMARY: 0 errors" in text else f"no summary: {text[-300:]}"


def _collectives(double: bool) -> str:
    """Runs the tests of the collectives. Raises Needs if all of them are skipped."""
    path = f"tests/{'parallel/test_gpu_table.py' if double else 'gpu/test_collectives.py'}"
    options = ("-q", "-x", "-p", "no:cacheprovider", "-W", "default", "--inner=-Wdefault")
    command = (sys.executable, "-m", "pytest", path, "--ranks", "1", *options)
    text = run(LIMITS["collectives"], *command)
    found = re.search(r"^(\d+) tests passed on all ranks", text, re.MULTILINE)
    if found and int(found[1]) > 0:
        return ""
    skipped = re.search(r"^SKIPPED.*?: (.*)$", text, re.MULTILINE)
    raise Needs(skipped[1].removeprefix("needs ") if skipped else f"tests; {path} ran none")


def _steps(double: bool) -> dict[str, Callable[[], str]]:
    """Step name -> function that returns "" on success, or else what is wrong."""
    return {
        "doctor": lambda: _doctor(double),
        "sanitizer": lambda: _sanitizer(double),
        "collectives": lambda: _collectives(double),
        "facts-1": lambda: _check_facts(1),
        "facts-2": lambda: _check_facts(2),
    }


def main() -> int:
    """Runs the selected steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--double", action="store_true", help="on the test double")
    parser.add_argument("steps", nargs="*", metavar="STEP")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that steps end their children
    adopt()
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
