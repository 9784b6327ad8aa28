# SPDX-License-Identifier: Apache-2.0
"""Runs contestants alternately in one job, so that ratios hold on a noisy machine."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

import farandole
from farandole.tools.bench_report import settings
from farandole.tools.bench_timing import everywhere

Seconds = np.ndarray[Any, np.dtype[np.float64]]
_FEWEST = 3  # turns, however long they take
_SILENCE = 10.0  # seconds between two lines of progress


@dataclass
class Contestant:
    """`prepare` and `wrong` (a count) are not timed; `run` gives its own seconds."""

    prepare: Callable[[], object]
    run: Callable[[], float]
    wrong: Callable[[], int]


@dataclass
class Row:
    """One line of the tables. `seconds`: of each turn, by default the mean over the ranks."""

    what: str
    who: str
    seconds: Seconds
    wrong: int = 0

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    def ratio(self, other: Row) -> float:
        """This time divided by another: the median over the turns if both have equally many, else
        the ratio of medians."""
        if len(self.seconds) == len(other.seconds):
            return float(np.median(self.seconds / other.seconds))
        return self.median / other.median


def take_turns(
    what: str,
    contestants: dict[str, Contestant],
    turns: int,
    over: Callable[..., Seconds] = np.mean,
    budget: float = inf,
) -> list[Row]:
    """Runs each contestant in each turn, after one turn that is not counted. Collective.

    `over` combines the ranks' seconds of a turn. `budget`: seconds, including checks, after which
    no turn starts."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    wrong = dict.fromkeys(contestants, 0)
    start = told = monotonic()
    for turn in range(turns + 1):
        now = monotonic()
        if farandole.rank() == 0 and now - told > _SILENCE:
            print(f"# {what}: {turn} of {turns + 1} turns", file=sys.stderr, flush=True)
            told = now
        if turn > _FEWEST and everywhere([now - start]).max() > budget:
            break
        for name, contestant in contestants.items():
            contestant.prepare()
            gc.collect()
            gc.disable()
            farandole.barrier()
            took = contestant.run()
            gc.enable()
            wrong[name] += contestant.wrong()
            if turn > 0:
                seconds[name].append(took)
    return [
        Row(
            what,
            name,
            over(everywhere(seconds[name]), axis=0),
            int(everywhere([wrong[name]]).sum()),
        )
        for name in contestants
    ]


def minus(row: Row, without: Row, who: str) -> Row:
    """The difference of two contestants, turn by turn."""
    return Row(row.what, who, row.seconds - without.seconds, row.wrong + without.wrong)


def show(rows: list[Row], against: tuple[str, ...] = ("gloo", "mpi", "DDP")) -> None:
    """Prints the times of all rows, and farandole's ratios to the others of the same case."""
    if farandole.rank() != 0:
        return
    for row in rows:
        us = [1e6 * float(np.quantile(row.seconds, q)) for q in (0, 0.5, 0.99)]
        line = f"{row.what:28} {row.who:24} {us[0]:11.1f} {us[1]:11.1f} {us[2]:11.1f} {row.wrong:6}"
        if row.who.startswith("farandole"):
            for other in rows:
                if other.what == row.what and other.who.startswith(against):
                    line += f"  {row.ratio(other):.2f} x {other.who}"
        print(line, flush=True)


def head() -> None:
    """Prints settings and the table's first line. Collective."""
    print_head(
        f"{'case':28} {'who':24} {'min us':>11} {'median us':>11} {'p99 us':>11} {'wrong':>6}"
    )


def print_head(line: str) -> None:
    """Prints settings and a table's first line. Collective."""
    found = settings()
    if farandole.rank() == 0:
        for name, value in found.items():
            print(f"# {name}: {value}")
        print(line, flush=True)


def save(rows: list[Row], path: Path | None, **more: object) -> None:
    """Writes JSON if there is a path. Collective."""
    if path is None:
        return
    found = settings()
    if farandole.rank() == 0:
        table = [
            {"what": r.what, "who": r.who, "seconds": r.seconds.tolist(), "wrong": r.wrong}
            for r in rows
        ]
        path.write_text(json.dumps({"settings": found, "rows": table, **more}, indent=1))


def finish(rows: list[Row], path: Path | None, **more: object) -> int:
    """Writes JSON if there is a path. Returns 1 if a result was wrong. Collective."""
    wrong = sum(row.wrong for row in rows)
    save(rows, path, **more)
    if farandole.rank() == 0:
        print(f"# wrong: {wrong}", flush=True)
    return int(wrong > 0)
