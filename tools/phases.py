#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""phases.py test|all|ci [MINUTES]: runs a suite's phases, then prints a table of their minutes.

`make test`, `make test-all` and .ci/run call this script. In CI, the phases and the MINUTES that
have already passed must fit into CI_MINUTES. A phase is a target of the Makefile. After a failure,
other phases still run. A phase that lacks something on this machine is skipped, with the reason.

A phase may name a target that prepares it: an environment or a build. In CI, two lanes make these
targets while earlier phases run. The lanes have the lowest priority: they compile while tests wait.

If CI is set, failed tests run once more, alone, because a test that fails once in a thousand runs
says nothing about the change. The table counts such tests.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness import hosts  # noqa: E402

CI_MINUTES = 85
FAILURES = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


def _output(*command: str) -> str:
    """The output of a command; "" if the command cannot run."""
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


@functools.cache
def _no_index() -> str:
    """Why a phase that installs packages cannot run: pip finds no package index. Else ""."""
    command = ["-m", "pip", "download", "-qq", "--no-deps", "-d", str(ROOT / "build" / "index")]
    done = subprocess.run([sys.executable, *command, "iniconfig"], capture_output=True)
    return "" if done.returncode == 0 else "needs a package index: pip finds none"


@dataclass(frozen=True)
class Phase:
    """`make target ARGS=...`. `minutes`: its duration on 2 cores, including builds."""

    target: str
    minutes: float
    args: str = ""
    lacks: Callable[[], str] = str
    variables: tuple[str, ...] = ()  # variables of make
    prepare: str = ""  # a target that is made before, with the same variables
    pytest: bool = True

    @property
    def name(self) -> str:
        """The phase's name in the table."""
        return " ".join([self.target, *self.variables])

    def run(self) -> str:
        """Runs the phase. Returns an outcome that starts with `passed`, or else `FAILED`."""
        FAILURES.unlink(missing_ok=True)
        if self._make(self.args):
            return "passed"
        failures = list(json.loads(FAILURES.read_text())) if FAILURES.exists() else []
        if self.pytest and failures and os.environ.get("CI"):
            print(f"==== once more, alone: {' '.join(failures)} ====", flush=True)
            if self._make(f"{self.args} --last-failed --last-failed-no-failures none -n 0"):
                return f"passed; at a second try only: {len(failures)}"
        return "FAILED"

    def _make(self, arguments: str) -> bool:
        args = [f"ARGS={arguments}"] if arguments else []  # else ARGS of the make that called
        command = ["make", "--no-print-directory", self.target, *self.variables, *args]
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode == 0


# In the kernel's scheduler, each session is a group (autogroup) with a separate priority.
LAST = '{ echo 19 > /proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$@"'


class Lanes:
    """Prepares phases while earlier ones run. Of its two threads, one compiles and one installs."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._ready = {phase: threading.Event() for phase in phases if phase.prepare}
        self._running: list[subprocess.Popen[bytes]] = []
        for installs in (False, True):
            lane = [each for each in self._ready if (each.prepare != "sanitized") == installs]
            threading.Thread(target=self._prepare, args=(lane,), daemon=True).start()

    def _prepare(self, lane: list[Phase]) -> None:
        for phase in lane:
            try:
                if not phase.lacks():
                    self._make(phase)
            except Exception:  # the phase itself will fail; the others must not wait for it
                traceback.print_exc()
            self._ready[phase].set()

    def _make(self, phase: Phase) -> None:
        """Prints the log if make fails. A phase that has the target as prerequisite tries again."""
        path = ROOT / "build" / "prepare" / f"{phase.prepare.replace('/', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["make", "--no-print-directory", phase.prepare, *phase.variables]
        with path.open("w") as log:
            process = subprocess.Popen(
                ["sh", "-c", LAST, "sh", *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        if process.wait():
            print(f"==== {phase.prepare} has failed ====\n{path.read_text()}", flush=True)

    def wait(self, phase: Phase) -> None:
        """Returns once the phase has been prepared."""
        if phase in self._ready:
            self._ready[phase].wait()

    def end(self) -> None:
        """Ends the targets that are still being made."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


def _ticks() -> tuple[int, int]:
    """Clock ticks of all cores since boot: (busy ticks, all ticks)."""
    user, nice, system, idle, waiting, *rest = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting


LINT = Phase("lint", 1.5, pytest=False)
QUICK = (
    Phase("test-cpp", 2),
    Phase("test-single", 5),
    Phase("test-parallel", 6),
)
SANITIZE = tuple(
    Phase(
        "test-sanitize",
        9,
        lacks=_no_sanitizers,
        variables=(f"SANITIZE={what}",),
        prepare="sanitized",
    )
    for what in ("address,undefined", "thread")
)
JOBS = Phase("test-jobs", 10)
SCHEDULES = Phase("test-schedules", 6)  # tests skip themselves if they can't have hosts
# Runs as many programs as its time allows.
STRANGERS = Phase(
    "test-strangers",
    5,
    lacks=lambda: _no_library("libasan.so"),
    variables=("SANITIZE=address", "STRANGERS_SECONDS=30", "STRANGERS_RANKS=2,3"),
)
RECIPES = Phase("test-recipes", 4, lacks=_no_index, prepare="build/recipes/.stamp")
JAX = Phase("test-jax", 6, lacks=_no_index, prepare="build/jax/.stamp")
TENSORFLOW = Phase("test-tensorflow", 6, lacks=_no_index, prepare="build/tensorflow/.stamp")
KERAS = Phase("test-keras", 6, lacks=_no_index)
DOCS = Phase("docs", 2, lacks=_no_index, pytest=False, prepare="build/docs/.stamp")
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
        Phase("fuzz", 1.5, args="--seconds 60", pytest=False),
        Phase("soak", 1, args="--seeds 100", pytest=False),
        STRANGERS,
        RECIPES,
        JAX,
        TENSORFLOW,
        KERAS,
        Phase("test-clients", 45, lacks=_no_index, pytest=False),
    ),
    # Phases that mostly wait come first, so that the lanes make progress.
    "ci": (
        LINT,
        *QUICK[1:],
        Phase(
            "test-jobs",
            10,
            args="tests/jobs tests/hosts",
            prepare="mpi-wheels",
        ),
        QUICK[0],
        *SANITIZE,
        DOCS,
        RECIPES,
        JAX,
        TENSORFLOW,
        KERAS,
        Phase("wheel-run", 2, lacks=_no_index, pytest=False, prepare="wheel-venv"),
        Phase(
            "test-clients",
            4,
            args="--quick",
            lacks=_no_index,
            pytest=False,
            prepare="clients-quick",
        ),
        Phase("test-hosts-quick", 4, lacks=hosts.why_not),
        STRANGERS,
        SCHEDULES,
    ),
}


def main(suite: str, minutes: str = "0") -> int:
    """Runs a suite. Returns 1 if a phase has failed."""
    begin, rows, failed = time.monotonic() - 60 * float(minutes), [], False
    phases = SUITES[suite]
    lanes = Lanes(phases if suite == "ci" else ())
    atexit.register(lanes.end)
    for phase in phases:
        start, (busy, ticks) = time.monotonic(), _ticks()
        left = CI_MINUTES - (start - begin) / 60
        if suite == "ci" and phase.minutes > left:
            outcome = f"LEFT OUT: it takes {phase.minutes} minutes, but only {left:.0f} are left"
        elif reason := phase.lacks():
            outcome = f"skipped: {reason}"
        else:
            lanes.wait(phase)
            print(f"==== {phase.name} ====", flush=True)
            outcome = phase.run()
            failed |= outcome == "FAILED"
        used, passed = (now - before for now, before in zip(_ticks(), (busy, ticks), strict=True))
        minutes_taken = (time.monotonic() - start) / 60
        rows.append((phase.name, minutes_taken, 100 * used / max(passed, 1), outcome))
    width = max(len(name) for name, *_ in rows)
    print(f"==== {'phase':{width}} minutes  cores in use")
    for name, took, share, outcome in rows:
        print(f"     {name:{width}} {took:7.1f} {share:12.0f} %  {outcome}")
    print(f"     {'all':{width}} {(time.monotonic() - begin) / 60:7.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
