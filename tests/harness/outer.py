# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin outside: a file of tests/parallel or tests/gpu is an item per world size.

All files of tests/parallel share one mpirun per world size (harness.world), in which each is run
by a runtime that has just started; those with the mark `world` share another, and each of tests/gpu
has its own. What follows a failure runs in a new one.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import gpu
from harness.hosts import why_not
from harness.process import JobError
from harness.report import Report
from harness.sizes import POSSIBLE, own_sizes, sizes_of
from harness.world import TESTS, TOLD, World

_LATE = "not run: the time budget is used up"
_ITEM_SECONDS = 300.0  # pyproject.toml's, for what owns no cards
_WORLD = re.compile(r'^(?:pytestmark = \[?|    )pytest\.mark\.world\("(\w+)"\)', re.MULTILINE)
_folder = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
_world = pytest.StashKey[World]()
_end = pytest.StashKey[float]()  # of the --budget, time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parallel")
    group.addoption("--ranks", default="", help="world sizes (those of harness/sizes.py): 2,4")
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
    path = config.getoption("--report")
    if path and not hasattr(config, "workerinput"):  # xdist's workers report to the first process
        config.pluginmanager.register(Report(path))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends what a run that was cut short has left."""
    if world := config.stash.get(_world, None):
        world.close()
    if folder := config.stash.get(_folder, None):
        folder.cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares a world comes together; few ranks come first: they tell most for their time."""
    items.sort(key=lambda item: item.name if isinstance(item, ParallelRun) else "@np3")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What would be too late is told apart from what was not wanted."""
    if time.monotonic() > item.config.stash[_end]:
        pytest.fail(_LATE, pytrace=False)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Take these folders' files out of ordinary collection: they run inside."""
    if module_path.parent.parent != TESTS or module_path.parent.name not in POSSIBLE:
        return None
    return ParallelFile.from_parent(parent, path=module_path)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


class ParallelFile(pytest.File):
    """One file; its items are world sizes."""

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each size that is asked for and that the file's own marks allow."""
        hosts = _numbers(self.config.getoption("--hosts"))
        asked = [sum(hosts)] if hosts else _numbers(self.config.getoption("--ranks"))
        found = _WORLD.search(self.path.read_text())
        own = f"-{self.path.stem}" if self.path.parent.name == "gpu" else ""
        own = f"-{found[1]}" if found else own
        for size in own_sizes(self.path):
            if size in (asked or sizes_of(self.path)):
                yield ParallelRun.from_parent(self, name=f"@np{size}{own}", ranks=size)


class ParallelRun(pytest.Item):
    """One file at one world size. Items of one name share a world.

    With --dist loadgroup, worlds run side by side: xdist gives one process all items whose names
    are alike from the "@" on. (Its marks for this, in 3.8, do not reach pytest 9.2.)
    """

    def __init__(self, *, ranks: int, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.ranks = ranks
        self.waits = gpu.waits(ranks) if self.path.parent.name == "gpu" else (0.0, 0.0)
        if self.waits[1] > 0:
            self.add_marker(pytest.mark.timeout(_ITEM_SECONDS + self.waits[1]))

    def runtest(self) -> None:
        """Fails with the output of every rank that failed, or with all stacks after a deadline.

        With --keep-going a job that ended early is followed by one that runs the rest.
        """
        if self.path.parent.name == "gpu":
            gpu.need()
        if self.path.parent.name == "with_jax":
            pytest.importorskip("jax", reason="needs jax: make test-jax")
        if self.path.parent.name == "with_tensorflow" and not find_spec("tensorflow"):
            pytest.skip("needs TensorFlow: make test-tensorflow")
        if self.config.getoption("--hosts") and (reason := why_not()):
            pytest.skip(reason)
        tests: dict[str, Any] = {}
        failures: list[str] = []
        folder = self._folder()
        while True:
            failure = self._attempt()
            found = _told(folder / TOLD)
            tests |= found
            if not failure:
                break
            failures.append(failure)
            wanted = json.loads((folder / "wanted.json").read_text()) if found else []
            rest = [test for test in wanted if test not in tests]
            if not self.config.getoption("--keep-going") or not rest:
                break
            if time.monotonic() > self.config.stash[_end]:
                late = {"outcome": "failed", "seconds": 0.0, "reason": _LATE}
                tests |= dict.fromkeys(rest, late)
                break
            for path in (*folder.glob("failed-*"), *folder.glob("rank-*.log")):
                path.unlink()  # told
            (folder / TOLD).unlink()
            (folder / "done.json").write_text(json.dumps(list(tests)))
        self.user_properties.append(("inside", tests))
        if failures:
            raise JobError("\n".join(failures))

    def _attempt(self) -> str:
        """Waits until the world has run this file's tests that are not done; what went wrong."""
        world = self.config.stash.get(_world, None)
        if world is None or world.files.get(self.path) != self._folder():  # one of another size
            if world:
                world.close()
            world = self.config.stash[_world] = self._new_world()
        try:
            failure = world.finish(self.path, self.config.stash[_end])
        except JobError as error:
            failure = str(error)
        if failure:
            world.close()
            del self.config.stash[_world]
        return failure

    def _new_world(self) -> World:
        """For this file and those that share its world and come later."""
        later = self.session.items[self.session.items.index(self) :]
        parallel = [item for item in later if isinstance(item, ParallelRun)]
        runs = [run for run in parallel if run.name == self.name]
        env = gpu.environment()
        if self.config.getoption("--keep-going"):
            env["FARANDOLE_TEST_KEEP_GOING"] = "1"
        return World(
            self._folder().parent,
            {run.path: run._folder() for run in runs},
            self.ranks,
            hosts=_numbers(self.config.getoption("--hosts")),
            options=shlex.split(self.config.getoption("--inner")),
            env=env,
            waits=self.waits,
        )

    def _folder(self) -> Path:
        """Where the ranks leave what they find in this file."""
        if _folder not in self.config.stash:
            self.config.stash[_folder] = tempfile.TemporaryDirectory()
        folder = Path(self.config.stash[_folder].name) / self.name / self.path.stem
        folder.mkdir(parents=True, exist_ok=True)
        return folder

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


def _told(path: Path) -> dict[str, Any]:
    """By test, how it has ended."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: found for line in lines for name, found in json.loads(line).items()}


@pytest.fixture
def inner_skips(request: pytest.FixtureRequest) -> list[str]:
    """Where a test adds what was skipped in programs that it ran; shown at the end."""
    skips: list[str] = []
    request.node.user_properties.append(("skips", skips))
    return skips


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests passed on every rank, and what was skipped inside ranks and C++ programs."""
    runs, passed = 0, 0
    skips: list[str] = []
    for report in (report for some in terminalreporter.stats.values() for report in some):
        if getattr(report, "when", "") != "teardown":
            continue  # the last of an item has all that the item tells
        told = dict(report.user_properties)
        skips += told.get("skips", [])
        if "inside" in told:
            runs += 1
            passed += sum(found["outcome"] == "passed" for found in told["inside"].values())
            skips += [
                f"{report.nodeid}: {test}: {found['reason']}"
                for test, found in told["inside"].items()
                if found["outcome"] == "skipped"
            ]
    if runs or skips:
        terminalreporter.section("inside ranks and programs")
        terminalreporter.write_line(f"{passed} tests passed on all ranks of {runs} runs")
    for skip in skips:
        terminalreporter.write_line(f"SKIPPED {skip}")
