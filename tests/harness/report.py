# SPDX-License-Identifier: Apache-2.0
"""What `--report` leaves: every test's outcome as JSON, and a table of them as Markdown beside it.

Written anew after each test, so that a run which is cut off leaves what it has.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import gpu

_OUTCOMES = ("passed", "failed", "skipped")
_SHOWN = 6  # names and reasons of a file; all are in the JSON


class Report:
    """A pytest plugin; an item that ran tests inside ranks tells them in its user_properties."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._about = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
            **gpu.describe(),
        }
        self._rows: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each phase of an item; the worst one counts."""
        row = self._rows.setdefault(
            report.nodeid, {"outcome": "passed", "seconds": 0.0, "text": "", "inside": {}}
        )
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        row["inside"] |= dict(report.user_properties).get("inside", {})
        if report.outcome != "passed":
            row["outcome"], row["text"] = report.outcome, report.longreprtext
        if report.when == "teardown":
            self._write()

    def _write(self) -> None:
        found = {"about": self._about, "tests": self._rows}
        self._path.write_text(json.dumps(found, indent=1))
        self._path.with_suffix(".md").write_text(self._table())

    def _table(self) -> str:
        """What has failed inside, then one line an item: who sees only the end sees those."""
        lines = [f"- {name}: {value}" for name, value in self._about.items()]
        for name, row in self._rows.items():
            if row["outcome"] == "failed":
                lines += [f"- {name}: {_failed(row)}", *_reasons(row["text"])]
        lines += ["", "| tests | outcome | passed | failed | skipped | s |"]
        lines += ["|---|---|---|---|---|---|"]
        total: Counter[str] = Counter()
        for name, row in self._rows.items():
            count = Counter(test["outcome"] for test in row["inside"].values())
            count = count or Counter([row["outcome"]])
            total += count
            cells = " | ".join(str(count[outcome]) for outcome in _OUTCOMES)
            lines.append(f"| {name} | {row['outcome']} | {cells} | {row['seconds']:.1f} |")
        cells = " | ".join(str(total[outcome]) for outcome in _OUTCOMES)
        lines += [f"| all | | {cells} | |"]
        return "\n".join(lines) + "\n"


def _failed(row: dict[str, Any]) -> str:
    """The first tests that have failed inside, or why there are none."""
    failed = [test for test, found in row["inside"].items() if found["outcome"] == "failed"]
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return ", ".join(failed[:_SHOWN]) + more or (row["text"].strip().splitlines() or [""])[-1]


def _reasons(text: str) -> list[str]:
    """What failing assertions and exceptions say, the most frequent first."""
    said = Counter(line[1:].strip() for line in text.splitlines() if line.startswith("E  "))
    return [f"  - {count} x `{line[:200]}`" for line, count in said.most_common(_SHOWN)]
