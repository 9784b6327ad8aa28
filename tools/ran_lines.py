# SPDX-License-Identifier: Apache-2.0
"""Records with coverage.py which test files run which Python lines, for tools/mutate.py.

This pytest plugin also runs in the ranks that a test starts. It tells coverage which test file is
running; lines that run meanwhile, also in child processes, count for that file. If all tests of a
file have passed, it writes their total seconds to the file that RAN_LINES_SECONDS names.
"""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import coverage
import pytest

_NOW = "RAN_LINES_NOW"  # for programs that a test starts: file of the test
# Text of a .pth file that starts coverage in every process that has COVERAGE_PROCESS_START set.
HOOK = """\
{tools}
import os; "COVERAGE_PROCESS_START" in os.environ and __import__("coverage").process_startup()
"""


def settings(data: Path, tree: Path) -> str:
    """Settings for coverage. Every process writes a separate file into `data`."""
    return f"""\
[run]
parallel = true
data_file = {data}/lines
context = ${{{_NOW}-}}
include = {tree}/pyruntime/*, {tree}/adapters/*, {tree}/extras/*
disable_warnings = no-data-collected
"""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Makes coverage count all lines that run from now on for the test's file."""
    os.environ[_NOW] = item.nodeid.split("::")[0]
    if watch := coverage.Coverage.current():
        watch.switch_context(os.environ[_NOW])


_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up the seconds of each test file."""
    file = report.nodeid.split("::")[0]
    _seconds[file] += report.duration
    if report.failed:
        _failed.add(file)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the seconds. Only the outermost pytest does so."""
    inside = hasattr(session.config, "workerinput") or "FARANDOLE_TEST_STEP" in os.environ
    if (name := os.environ.get("RAN_LINES_SECONDS")) and not inside:
        path = Path(name)
        known = json.loads(path.read_text()) if path.exists() else {}
        new = {file: took for file, took in _seconds.items() if file not in _failed}
        path.write_text(json.dumps(known | new, indent=1))


def by_line(data: Path, tree: Path) -> dict[str, dict[int, list[str]]]:
    """Source -> line -> test files that run the line; "" stands for an import."""
    found = coverage.CoverageData(str(data / "lines"))
    found.read()
    lines = {}
    for path in found.measured_files():
        contexts = found.contexts_by_lineno(path).items()
        lines[Path(path).relative_to(tree).as_posix()] = {
            line: sorted({name.split("|")[-1] for name in names}) for line, names in contexts
        }
    return lines


def checks(
    lines: Mapping[int, Sequence[str]], line: int, seconds: Mapping[str, float], enough: float
) -> list[str]:
    """Chooses test files that check a line. Returns arguments for up to two runs of pytest.

    Files that run most lines of the source come first. The first run takes a third of `enough`
    seconds, the second run the rest. If only imports run the line, all test files that run lines of
    the source are candidates. Returns [] for a line that no test runs.
    """
    ran = Counter(file for names in lines.values() for file in names if file in seconds)
    files = [file for file in lines.get(line, ()) if file in ran]
    if line in lines and not files:
        files = list(ran)
    files.sort(key=lambda file: (-ran[file], seconds[file]))
    took = list(accumulate(seconds[file] for file in files))
    first = max(1, bisect(took, enough / 3))
    runs = files[:first], files[first : bisect(took, enough)]
    return [" ".join(run) for run in runs if run]
