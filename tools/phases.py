#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""phases.py test|all|ci [MINUTES]: the phases of a suite one by one, then a table of their minutes.

`make test` and `make test-all` call it, and .ci/run after `make test`: what it adds must fit into
CI_MINUTES beside the MINUTES that have passed. A phase is a target of the Makefile. One that fails
keeps no other from running; one that lacks something on this machine is skipped, with the reason.

With CI set, tests that failed run once more, alone: CI's verdict is about the change, and a test
that fails once in a thousand runs says nothing of it. The table counts them, so that they are read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import hosts  # noqa: E402

CI_MINUTES = 85
FAILURES = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


def _output(*command: str) -> str:
    """What a command writes; empty if it cannot run."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _no_library(name: str) -> str:
    found = _output("gcc", f"-print-file-name={name}")
    return "" if Path(found).is_absolute() else f"needs gcc's {name}"


def _no_sanitizers() -> str:
    return _no_library("libasan.so") or _no_library("libubsan.so") or _no_library("libtsan.so")


def _no_openmpi4() -> str:
    there = "Open MPI) 4." in _output("/usr/bin/mpirun", "--version")
    return "" if there else "needs Open MPI 4.1 in /usr/bin (Debian: apt-get install openmpi-bin)"


def _no_aarch64() -> str:
    there = shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")
    needed = "needs Debian's g++-aarch64-linux-gnu and qemu-user"
    return "" if there else needed


def _no_aarch64_python() -> str:
    there = shutil.which("apt-get") and shutil.which("dpkg-deb")
    return _no_aarch64() or _no_index() or ("" if there else "needs apt-get, for Debian's Python")


def _no_nccl() -> str:
    return "" if os.environ.get("NCCL") else "needs NCCL=<libnccl.so.2 with kernels by name only>"


def _no_index() -> str:
    """What a phase installs from a package index must be there."""
    command = ["-m", "pip", "download", "-qq", "--no-deps", "-d", str(ROOT / "build" / "index")]
    done = subprocess.run([sys.executable, *command, "iniconfig"], capture_output=True)
    return "" if done.returncode == 0 else "needs a package index: pip finds none"


@dataclass(frozen=True)
class Phase:
    """`make target ARGS=...`; `minutes` is what it takes on 2 cores, with what it builds."""

    target: str
    minutes: float
    args: str = ""
    lacks: Callable[[], str] = str
    variables: tuple[str, ...] = ()  # of make
    judges: bool = True  # False: a failure is for people to read
    pytest: bool = True

    @property
    def name(self) -> str:
        """As in the table."""
        return " ".join([self.target, *self.variables])

    def run(self) -> str:
        """The outcome: begins with `passed`, or with `FAILED`, if that is CI's verdict."""
        FAILURES.unlink(missing_ok=True)
        if self._make(self.args):
            return "passed"
        failures = list(json.loads(FAILURES.read_text())) if FAILURES.exists() else []
        if self.pytest and failures and os.environ.get("CI"):
            print(f"==== once more, alone: {' '.join(failures)} ====", flush=True)
            if self._make(f"{self.args} --last-failed --last-failed-no-failures none -n 0"):
                return f"passed; at a second try only: {len(failures)}"
        return "FAILED" if self.judges else "failed: see above"

    def _make(self, arguments: str) -> bool:
        args = [f"ARGS={arguments}"] if arguments else []  # none: those of the make that called
        command = ["make", "--no-print-directory", self.target, *self.variables, *args]
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode == 0


QUICK = (
    Phase("test-cpp", 2),
    Phase("test-single", 5),
    Phase("test-parallel", 6),
)
SANITIZE = tuple(
    Phase("test-sanitize", 15, lacks=_no_sanitizers, variables=(f"SANITIZE={what}",))
    for what in ("address,undefined", "thread")
)
JOBS = Phase("test-jobs", 10)
SCHEDULES = Phase("test-schedules", 6)  # what needs hosts skips itself, and says why
WHEEL = Phase("test-wheel", 6, lacks=_no_index, pytest=False)
# As many programs as its seconds allow.
STRANGERS = Phase(
    "test-strangers",
    8,
    lacks=lambda: _no_library("libasan.so"),
    variables=("SANITIZE=address", "STRANGERS_SECONDS=60", "STRANGERS_RANKS=2,3"),
)
RECIPES = Phase("test-recipes", 5, lacks=_no_index)
JAX = Phase("test-jax", 10, lacks=_no_index)
TENSORFLOW = Phase("test-tensorflow", 8, lacks=_no_index)
KERAS = Phase("test-keras", 8, lacks=_no_index)
CLIENTS = Phase("test-clients", 6, args="--quick", lacks=_no_index, pytest=False)
DOCS = Phase("docs", 3.5, lacks=_no_index, pytest=False)
FUZZ = Phase("fuzz", 1.5, args="--seconds 60", pytest=False)
SOAK = Phase("soak", 1, args="--seeds 20", pytest=False)
SUITES = {
    "test": QUICK,
    "all": (
        *QUICK,
        *SANITIZE,
        JOBS,
        SCHEDULES,
        Phase("test-examples", 4),
        Phase("test-nccl", 6, lacks=_no_nccl),
        Phase("test-hosts", 20, lacks=hosts.why_not),
        Phase("test-mpich", 8, lacks=_no_index),
        Phase("test-openmpi4", 8, lacks=_no_openmpi4),
        Phase("test-aarch64", 10, lacks=_no_aarch64),
        Phase("test-aarch64-wheel", 6, lacks=_no_aarch64_python, pytest=False),
        Phase("test-matrix", 18, lacks=_no_index),
        Phase("release-check", 20, lacks=_no_index, pytest=False),
        FUZZ,
        SOAK,
        STRANGERS,
        RECIPES,
        JAX,
        TENSORFLOW,
        KERAS,
        Phase("test-clients", 45, lacks=_no_index, pytest=False),
    ),
    "ci": (
        *SANITIZE,
        JOBS,
        SCHEDULES,
        WHEEL,
        DOCS,
        RECIPES,
        Phase("test-hosts-quick", 8, lacks=hosts.why_not),
        FUZZ,
        SOAK,
        JAX,
        TENSORFLOW,
        KERAS,
        STRANGERS,
        CLIENTS,
    ),
}


def main(suite: str, minutes: str = "0") -> int:
    """1 if a phase failed."""
    begin, rows, failed = time.monotonic() - 60 * float(minutes), [], False
    for phase in SUITES[suite]:
        start = time.monotonic()
        left = CI_MINUTES - (start - begin) / 60
        if suite == "ci" and phase.minutes > left:
            outcome = f"LEFT OUT: it takes {phase.minutes} minutes, and {left:.0f} are left"
        elif reason := phase.lacks():
            outcome = f"skipped: {reason}"
        else:
            print(f"==== {phase.name} ====", flush=True)
            outcome = phase.run()
            failed |= outcome == "FAILED"
        rows.append((phase.name, (time.monotonic() - start) / 60, outcome))
    width = max(len(name) for name, *_ in rows)
    print(f"==== {'phase':{width}} minutes")
    for name, took, outcome in rows:
        print(f"     {name:{width}} {took:7.1f}  {outcome}")
    print(f"     {'all':{width}} {(time.monotonic() - begin) / 60:7.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
