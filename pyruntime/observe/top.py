# SPDX-License-Identifier: Apache-2.0
"""`farandole top`: what the ranks of a running job on this host are doing, live."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.table import Table

from farandole.observe import flight
from farandole.observe.flight import Page

__all__ = ["add_arguments", "frame", "run"]

_EVENTS = 512  # looked at for the step rate


def _stands(page: Page) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    try:
        stat = Path(f"/proc/{page['pid']}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _state(page: Page) -> str:
    now = page["now"]
    if page["state"] != "running":
        return str(page["state"])
    if _stands(page):
        return "stopped"
    if now["waiters"]:
        return f"waits {(page['now_ns'] - now['waiting_since_ns']) / 1e9:.1f} s"
    return "moving" if now["moving_since_ns"] else "computing"


def _current(page: Page) -> str:
    """What a caller waits for; else the last tensor that was submitted."""
    if name := page["now"]["waiting_for"]:
        return str(name)
    names = (e["name"] or "(unnamed)" for e in reversed(page["events"]) if e["kind"] == "submit")
    return next(names, "-")


def _step_rate(page: Page) -> str:
    """How often the most frequent name comes again."""
    times: dict[str, list[int]] = defaultdict(list)
    for event in page["events"]:
        if event["kind"] == "submit" and event["name"]:
            times[event["name"]].append(event["t"])
    most = max(times.values(), key=len, default=[])
    if len(most) < 3:
        return "-"
    return f"{1e9 / median(b - a for a, b in pairwise(most)):.1f}/s"


def _waited_ns(page: Page) -> int:
    """By finished waits and the one under way."""
    since = page["now"]["waiting_since_ns"] if page["now"]["waiters"] else 0
    return int(page["histograms"]["wait_ns"]["sum"]) + (page["now_ns"] - since if since else 0)


def _row(page: Page, before: Page | None) -> list[str]:
    """Rates since the last look, or since init()."""
    seconds = (page["now_ns"] - (before or page)["now_ns"]) / 1e9 if before else 0.0
    if seconds <= 0:
        before, seconds = None, max((page["now_ns"] - page["began_ns"]) / 1e9, 1e-9)
    waited = _waited_ns(page) - (_waited_ns(before) if before else 0)
    moved = page["counters"]["bytes_done"] - (before["counters"]["bytes_done"] if before else 0)
    return [
        str(page["rank"]),
        str(page["pid"]),
        _state(page),
        _current(page),
        _step_rate(page),
        f"{min(100 * waited / seconds / 1e9, 100):.0f} %",
        f"{moved / seconds / 1e6:.1f} MB/s",
        str(page["late"]["times"]),
    ]


def frame(pages: Sequence[Page], before: Sequence[Page] | None = None) -> Table:
    """One picture of the job; `before`: the pages of the last one."""
    failed = [page["failure"]["text"].splitlines()[0] for page in pages if "failure" in page]
    table = Table(
        title=f"farandole: {len(pages)} of {pages[0]['size']} ranks on {pages[0]['host']}",
        caption=f"last failure: {failed[0]}" if failed else None,
    )
    for name in ("rank", "pid", "state", "tensor", "steps", "waiting", "moved", "last to come"):
        table.add_column(name, justify="left" if name in ("state", "tensor") else "right")
    for i, page in enumerate(pages):
        table.add_row(*_row(page, before[i] if before else None))
    return table


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole top`."""
    parser.add_argument("pids", nargs="*", type=int, help="any process of the job (default: all)")
    parser.add_argument("--once", action="store_true", help="one picture, averages since init()")
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between pictures")


def _follow(fd: int, console: Console, interval: float) -> None:
    before = flight.pages(fd, _EVENTS)
    with Live(frame(before), console=console, screen=console.is_terminal) as live:
        while any(page["state"] == "running" and _alive(page) for page in before):
            time.sleep(interval)
            pages = flight.pages(fd, _EVENTS)
            live.update(frame(pages, before), refresh=True)
            before = pages
    console.print(frame(before))


def _alive(page: Page) -> bool:
    return Path(f"/proc/{page['pid']}").exists()


def run(options: argparse.Namespace) -> int:
    """Show what the ranks of a running job on this host do; the job needs no flag for it."""
    jobs = flight.jobs_of(options.pids)
    if not jobs:
        print("no running farandole job of this user on this host", file=sys.stderr)
        return 1
    console = Console()
    if options.once:
        for job in jobs:
            with job.open() as fd:
                console.print(frame(flight.pages(fd, _EVENTS)))
        return 0
    if len(jobs) > 1:
        found = "; ".join(", ".join(map(str, job.pids)) for job in jobs)
        print(f"{len(jobs)} jobs ({found}): name a process of one", file=sys.stderr)
        return 1
    try:
        with jobs[0].open() as fd:
            _follow(fd, console, options.interval)
    except KeyboardInterrupt:
        pass
    return 0
