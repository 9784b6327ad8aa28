# SPDX-License-Identifier: Apache-2.0
"""`farandole top`: what the ranks of a running job on this host are doing, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from farandole.errors import FarandoleError, counted, printable, said
from farandole.observe import flight
from farandole.observe.flight import Page, message_text
from farandole.output import console, seconds
from farandole.start.siblings import stat

_EVENTS = 512  # events read for the step rate
_COLUMNS = ("rank", "pid", "state", "tensor", "steps/s", "waiting", "MB/s", "last")
_TENSOR = _COLUMNS.index("tensor")
_LONGEST = 60  # characters of the program in the title
EXAMPLES = """\
examples:
  farandole top                             # the only job of this user on this host, until it ends
  farandole top 4242 --interval 5           # the job of this process
  farandole top --once                      # one picture; so does a pipe or a file

state: waits (a caller is blocked), moving (a bucket is under way), computing, stopped (by a
signal), left, failed, died. tensor: what it waits for, else the last one submitted. waiting: share
of the time. last: how often the others waited for this rank.
"""


def _state(page: Page) -> str:
    now = page["now"]
    if page["state"] != "running":
        return str(page["state"])
    process = stat(page["pid"])
    if process is not None and process.state in "Tt":
        return "stopped"
    if now["waiters"]:
        return f"waits {(page['now_ns'] - now['waiting_since_ns']) / 1e9:.1f} s"
    return "moving" if now["moving_since_ns"] else "computing"


def _current(page: Page) -> str:
    """The tensor that a caller waits for; else the last one submitted."""
    if name := page["now"]["waiting_for"]:
        return str(name)
    names = (_name(e) for e in reversed(page["events"]) if e["kind"] == "submit")
    return next(names, "-")


def _name(event: dict[str, Any]) -> str:
    if "peer" in event:
        return message_text(event["op"], event["name"], event["peer"], event["tag"])
    return str(event["name"] or "(unnamed)")


def _step_rate(page: Page) -> str:
    """The rate of the most frequent name."""
    times: dict[str, list[int]] = defaultdict(list)
    for event in page["events"]:
        if event["kind"] == "submit" and event["name"]:
            times[event["name"]].append(event["t"])
    most = max(times.values(), key=len, default=[])
    if len(most) < 3:
        return "-"
    return f"{1e9 / median(b - a for a, b in pairwise(most)):.1f}"


def _waited_ns(page: Page) -> int:
    """Nanoseconds of finished waits and the one under way."""
    since = page["now"]["waiting_since_ns"] if page["now"]["waiters"] else 0
    return int(page["histograms"]["wait_ns"]["sum"]) + (page["now_ns"] - since if since else 0)


def _row(page: Page, before: Page | None) -> list[str]:
    """A rank's table row; rates since `before`, or since init()."""
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
        f"{moved / seconds / 1e6:.1f}",
        str(page["late"]["times"]),
    ]


def frame(pages: Sequence[Page], width: int, before: Sequence[Page] | None = None) -> Table:
    """One picture of the job, in `width` columns; `before`: the pages of the last one."""
    failed = [text for page in pages if (text := flight.failure_of(page))]
    size = counted(pages[0]["size"], "rank")
    if pages[0]["world"] > 1:
        size += f" of world {pages[0]['world']}"
    stories = [page["story"].splitlines()[-1] for page in pages if page.get("story")]
    caption = f"last failure: {failed[0]}" if failed else stories[0] if stories else None
    table = Table(
        title=escape(f"{len(pages)} of {size} on {pages[0]['host']}: {_program(pages)}"),
        caption=escape(caption) if caption else None,
        box=SIMPLE_HEAD,  # and little around cells: 80 columns are enough
        padding=(0, 1, 0, 0),
    )
    for name in _COLUMNS:
        left = name in ("state", "tensor")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    rows = [_row(page, before[i] if before else None) for i, page in enumerate(pages)]
    widths = [max(map(len, cells)) + 2 for cells in zip(_COLUMNS, *rows, strict=True)]
    room = max(width - sum(widths) + widths[_TENSOR] - 3, len(_COLUMNS[_TENSOR]))
    for row in rows:
        if len(row[_TENSOR]) > room:  # the end of a name tells more
            row[_TENSOR] = "…" + row[_TENSOR][1 - room :]
        table.add_row(*map(escape, row))
    return table


def _program(pages: Sequence[Page]) -> str:
    """The command line of the first rank that lives, without folders."""
    for page in pages:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{page['pid']}/cmdline").read_bytes().decode(errors="replace")
            words = [printable(" ".join(word.split())) for word in text.split("\0") if word]
            if words:
                script = [word if word[0] == "-" else Path(word).name for word in words[:2]]
                line = " ".join([*script, *words[2:]])
                return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return "farandole"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole top`."""
    parser.add_argument("pids", nargs="*", type=int, help="any process of the job (default: all)")
    parser.add_argument("--once", action="store_true", help="one picture, averages since init()")
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between pictures")


def _pages(job: flight.Job, fd: int) -> list[Page]:
    """The ranks' recorders. A pid that does not hold their memory becomes 0: it is another's."""
    found = flight.pages(fd, _EVENTS)
    return [page | {"pid": page["pid"] * (page["pid"] in job.pids)} for page in found]


def _follow(job: flight.Job, fd: int, out: Console, interval: float) -> None:
    before = _pages(job, fd)
    with Live(frame(before, out.width), console=out, screen=True) as live:
        while any(page["state"] == "running" and _alive(page) for page in before):
            time.sleep(interval)
            pages = _pages(job, fd)
            live.update(frame(pages, out.width, before), refresh=True)
            before = pages
    out.print(frame(before, out.width))


def _alive(page: Page) -> bool:
    return Path(f"/proc/{page['pid']}").exists()


def _show(job: flight.Job, out: Console) -> bool:
    """One picture of a job. False: it can't be read, which goes to stderr; others may be."""
    try:
        with job.open() as fd:
            out.print(frame(_pages(job, fd), out.width))
    except (OSError, ValueError, FarandoleError) as reason:
        who = "process" if len(job.pids) == 1 else "processes"
        told = f"{who} {', '.join(map(str, job.pids))}: {said(reason)}"
        print(f"farandole top: {told}", file=sys.stderr)
        return False
    return True


def run(options: argparse.Namespace) -> int:
    """Show what the ranks of a running job on this host are doing."""
    jobs = flight.jobs_of(options.pids)
    if not jobs:
        print(f"farandole top: {flight.why_no_job(options.pids)}", file=sys.stderr)
        return 1
    out = console()
    if options.once or not out.is_terminal:
        shown = [_show(job, out) for job in jobs]
        return 0 if any(shown) else 1
    if len(jobs) > 1:
        found = "; ".join(", ".join(map(str, job.pids)) for job in jobs)
        print(f"farandole top: {len(jobs)} jobs ({found}): name a process of one", file=sys.stderr)
        return 1
    with contextlib.suppress(KeyboardInterrupt), jobs[0].open() as fd:
        _follow(jobs[0], fd, out, options.interval)
    return 0
