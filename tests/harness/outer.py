# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin outside: a file of tests/parallel or tests/gpu is one mpirun per world size."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.rendezvous import RendezvousServer
from harness import gpu
from harness.hosts import simulated_hosts, why_not
from harness.mpirun import STARTS, MpiJob, mpi_job, started
from harness.process import JobError, JobResult
from harness.report import Report

TESTS = Path(__file__).resolve().parents[1]
SIZES = {"parallel": (1, 2, 3, 4), "gpu": (1, 2, 4)}  # by folder
TEST_SECONDS = 60.0  # one test on all ranks, the start of Python included
GRACE_SECONDS = 5.0  # for the other ranks, once one has failed
JOB_SECONDS = 270.0  # a whole file at one size

_LATE = "not run: the time budget is used up"
_FILE_RANKS = re.compile(r"^pytestmark = pytest\.mark\.ranks\(([\d, ]+)\)$", re.MULTILINE)
_skips = pytest.StashKey[list[str]]()
_passed = pytest.StashKey[list[int]]()
_end = pytest.StashKey[float]()  # of the --budget, time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parallel")
    group.addoption("--ranks", default="1,2,3,4", help="world sizes for tests/parallel (1,2,3,4)")
    group.addoption(
        "--hosts",
        default="",
        help="ranks on each simulated host, for tests/parallel instead of --ranks: 2,2",
    )
    group.addoption(
        "--inner", default="", help="pytest options for the runs inside, e.g. '-k bool'"
    )
    group.addoption("--keep-going", action="store_true", help="ranks go on after a failed test")
    group.addoption("--budget", type=float, help="seconds after which tests fail unstarted")
    group.addoption("--report", type=Path, metavar="FILE.json", help="outcomes; a table beside it")


def pytest_configure(config: pytest.Config) -> None:
    """A terminated pytest leaves as after Ctrl-C, so that the jobs it has started die with it."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
    config.stash[_end] = time.monotonic() + (config.getoption("--budget") or float("inf"))
    if path := config.getoption("--report"):
        config.pluginmanager.register(Report(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where time is short, few ranks come first: they tell most for their time."""
    if config.getoption("--budget"):
        items.sort(key=lambda item: item.ranks if isinstance(item, ParallelRun) else 3)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What would be too late is told apart from what was not wanted."""
    if time.monotonic() > item.config.stash[_end]:
        pytest.fail(_LATE, pytrace=False)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Take these folders' files out of ordinary collection: they run inside."""
    if module_path.parent.parent != TESTS or module_path.parent.name not in SIZES:
        return None
    return ParallelFile.from_parent(parent, path=module_path)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


class ParallelFile(pytest.File):
    """One file; its items are world sizes."""

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each size that the file's own `pytestmark` and --ranks both allow."""
        hosts = _numbers(self.config.getoption("--hosts"))
        wanted = {sum(hosts)} if hosts else set(_numbers(self.config.getoption("--ranks")))
        marker = _FILE_RANKS.search(self.path.read_text())
        sizes = SIZES[self.path.parent.name]
        if marker:
            sizes = tuple(_numbers(marker[1].replace(" ", "")))
        for size in sizes:
            if size in wanted:
                yield ParallelRun.from_parent(self, name=f"np{size}", ranks=size)


class ParallelRun(pytest.Item):
    """One mpirun of one file."""

    def __init__(self, *, ranks: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.ranks = ranks

    def runtest(self) -> None:
        """Fails with the output of every rank that failed, or with all stacks after a deadline.

        With --keep-going a job that ended early is followed by one that runs the rest.
        """
        if self.path.parent.name == "gpu":
            gpu.need()
        tests: dict[str, Any] = {}
        failures: list[str] = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            while True:
                failure = self._job(folder)
                found = _read(folder / "summary-0.json", {})
                tests |= found
                if not failure:
                    break
                failures.append(failure)
                rest = [test for test in _read(folder / "wanted.json", []) if test not in tests]
                if not self.config.getoption("--keep-going") or not found or not rest:
                    break
                if time.monotonic() > self.config.stash[_end]:
                    late = {"outcome": "failed", "seconds": 0.0, "reason": _LATE}
                    tests |= dict.fromkeys(rest, late)
                    break
                for path in (*folder.glob("failed-*"), *folder.glob("rank-*.log")):
                    path.unlink()  # told
                (folder / "summary-0.json").unlink()
                (folder / "done.json").write_text(json.dumps(list(tests)))
        self._summarise(tests)
        if failures:
            raise JobError("\n".join(failures))

    def _job(self, folder: Path) -> str:
        """One mpirun of all tests in the file that are not done; what went wrong."""
        hosts = _numbers(self.config.getoption("--hosts"))
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(RendezvousServer(self.ranks))
            argv = [sys.executable, "-m", "harness.rank_main", str(self.path)]
            argv += self.config.getoption("--inner").split()
            env = {
                "FARANDOLE_TEST_SIZE": str(self.ranks),
                "FARANDOLE_TEST_FOLDER": str(folder),
                "FARANDOLE_TEST_STEP": server.path,
                "PYTHONPATH": str(TESTS),
                **gpu.environment(),
            }
            if self.config.getoption("--keep-going"):
                env["FARANDOLE_TEST_KEEP_GOING"] = "1"
            mpi_args: list[str] = []
            if hosts:
                if reason := why_not():
                    pytest.skip(reason)
                simulated = stack.enter_context(simulated_hosts(folder, hosts))
                mpi_args = simulated.mpi_args()
                env |= simulated.environment()
            try:
                for _ in range(STARTS):
                    with mpi_job(argv, self.ranks, env, mpi_args) as job:
                        result = _watch(job, server, folder, self.config.stash[_end])
                        if result.returncode == 0:
                            job.finish(timeout=0)
                    if started(result):
                        break
            except JobError as error:
                return str(error)
            if result.returncode == 0:
                return ""
            return f"exit code {result.returncode}\n{_logs(folder, result.out)}"

    def repr_failure(  # type: ignore[override]
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> object:
        """The ranks' own reports, not the harness's traceback."""
        if isinstance(excinfo.value, JobError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """As pytest shows it."""
        return self.path, None, f"{self.path.name} at {self.ranks} ranks"

    def _summarise(self, tests: dict[str, Any]) -> None:
        self.user_properties.append(("inside", tests))
        passed = [test for test, found in tests.items() if found["outcome"] == "passed"]
        self.config.stash.setdefault(_passed, []).append(len(passed))
        self.config.stash.setdefault(_skips, []).extend(
            f"{self.path.name} at {self.ranks} ranks: {test}: {found['reason']}"
            for test, found in tests.items()
            if found["outcome"] == "skipped"
        )


def _read(path: Path, default: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else default


def _watch(job: MpiJob, server: RendezvousServer, folder: Path, end: float) -> JobResult:
    """Wait for the end; a test may take TEST_SECONDS, and GRACE_SECONDS once a rank has failed.

    Ranks that have met again after a failure go on with the next test.
    """
    now = time.monotonic()
    test_deadline, job_deadline = now + TEST_SECONDS, min(now + JOB_SECONDS, end)
    rounds, told, wait_for = 0, 0, "a test takes too long"
    while (result := job.process.wait(0.1)) is None:
        now = time.monotonic()
        before, told = told, sum(path.stat().st_size for path in folder.glob("failed-*"))
        if server.rounds != rounds:
            rounds, test_deadline = server.rounds, now + TEST_SECONDS
            wait_for = "a test takes too long"
        elif told != before:
            test_deadline = now + GRACE_SECONDS
            wait_for = "a rank failed and the others wait"
        if now > min(test_deadline, job_deadline):
            what = "the file's time is used up" if now > job_deadline else wait_for
            stacks = job.stacks()
            job.process.kill()
            raise JobError(f"{what}\n{_logs(folder, job.process.output)}\n{stacks}")
    return result


def _logs(folder: Path, launcher: str) -> str:
    """What the failed ranks tell, then the raw output of all ranks and of mpirun itself."""
    told = sorted(folder.glob("failed-*"))
    parts = [f"=== {path.name}\n{path.read_text(errors='replace')}" for path in told]
    logs = sorted(folder.glob("rank-*.log"))
    parts += [f"--- output of {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
    return "\n".join([*parts, f"--- output of mpirun\n{launcher}"])


@pytest.fixture
def inner_skips(request: pytest.FixtureRequest) -> list[str]:
    """Where a test adds what was skipped in programs that it ran; shown at the end."""
    return request.config.stash.setdefault(_skips, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests passed on every rank, and what was skipped inside ranks and C++ programs."""
    stash = terminalreporter.config.stash
    skips, passed = stash.get(_skips, []), stash.get(_passed, [])
    if skips or passed:
        terminalreporter.section("inside ranks and programs")
        terminalreporter.write_line(
            f"{sum(passed)} tests passed on all ranks of {len(passed)} runs"
        )
    for skip in skips:
        terminalreporter.write_line(f"SKIPPED {skip}")
