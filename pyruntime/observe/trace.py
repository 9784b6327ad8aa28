# SPDX-License-Identifier: Apache-2.0
"""Reads the traces of several ranks and merges them into one: `farandole trace`."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.errors import counted, said
from farandole.output import why_not
from farandole.trust import read_text, write_file

Event = dict[str, Any]
_MOST_BYTES = 1 << 30  # of one rank's trace
_MEMBERS = {"rank", "size"}  # of the event that tells whose it is


@dataclass
class RankTrace:
    """One rank's trace; times are microseconds of the host's monotonic clock."""

    rank: int
    size: int
    events: list[Event]


def siblings(path: Path) -> list[Path]:
    """The traces of all ranks of the run whose rank 0 wrote `path`."""
    name = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix))
    others = [p for p in path.parent.iterdir() if name.fullmatch(p.name)]
    return [path, *sorted(others, key=lambda p: int(re.findall(r"\.rank(\d+)", p.name)[-1]))]


def _events(path: Path) -> list[Event]:
    """The events of a trace that may be cut off, as that of a killed rank."""
    text = read_text(path, _MOST_BYTES)
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        whole = text[: text.rindex("}") + 1] if "}" in text else "["
        lines = whole.split("\n")
        found = None
        for kept in (lines, lines[:-1]):  # the second: cut inside the last event
            with contextlib.suppress(json.JSONDecodeError):
                found = json.loads("\n".join(kept).rstrip(",") + "]")
                break
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path} is not one rank's trace (pass rank 0's file, not a merged one)")
    return list(found)


def read(path: Path) -> RankTrace:
    """One rank's trace. Raises ValueError if farandole did not write it."""
    events = _events(path)
    about = next((e.get("args") for e in events if e.get("name") == "farandole"), None)
    if not isinstance(about, dict) or not about.keys() >= _MEMBERS:
        raise ValueError(f"{path} is not a trace of farandole")
    return RankTrace(about["rank"], about["size"], events)


def merge(traces: Sequence[RankTrace], out: Path) -> int:
    """Writes one trace of all ranks, starting at time 0; returns the number of events."""
    start = min((e["ts"] for t in traces for e in t.events if "ts" in e), default=0.0)
    events = [
        {**event, "ts": round(event["ts"] - start, 3)} if "ts" in event else event
        for trace in traces
        for event in trace.events
    ]
    write_file(out, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode())
    return len(events)


# ---- the command

EXAMPLES = """\
examples:
  FARANDOLE_TIMELINE=run.json mpirun -np 2 python train.py
  farandole trace merge run.json                    # run.merged.json, for https://ui.perfetto.dev
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole trace`."""
    actions = parser.add_subparsers(dest="action", required=True)
    merge = actions.add_parser("merge", help="one trace of all ranks")
    merge.add_argument(
        "path",
        type=Path,
        help="rank 0's trace; the other ranks' traces must be in the same folder",
    )
    merge.add_argument("-o", "--output", type=Path, help="default: NAME.merged.SUFFIX")


def run(options: argparse.Namespace) -> int:
    """Merge the traces that the ranks wrote."""
    if refused := why_not(options.output):
        print(f"farandole trace: {refused}", file=sys.stderr)
        return 2
    try:
        traces = [read(path) for path in siblings(options.path)]
    except (OSError, ValueError) as reason:
        print(f"farandole trace: {said(reason)}", file=sys.stderr)
        return 1
    if missing := traces[0].size - len(traces):
        print(
            f"{missing} of {counted(traces[0].size, 'rank')} wrote no trace here", file=sys.stderr
        )
    path: Path = options.path
    out: Path = options.output or path.with_name(f"{path.stem}.merged{path.suffix}")
    count = merge(traces, out)
    print(
        f"{out}: {counted(count, 'event')} of {counted(len(traces), 'rank')}; open it in https://ui.perfetto.dev"
    )
    return 0
