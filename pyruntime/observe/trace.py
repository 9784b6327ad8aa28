# SPDX-License-Identifier: Apache-2.0
"""Reads the traces of several ranks and merges them into one. For `farandole trace`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_MEMBERS = {
    "rank",
    "size",
    "clock_ns",
    "clock_error_ns",
}  # of the event that tells whose trace it is


@dataclass
class RankTrace:
    """One rank's trace; times are microseconds of the first rank's monotonic clock."""

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
    text = path.read_text(errors="replace")
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
        raise ValueError(f"{path} is not one rank's trace (give rank 0's own, not a merged one)")
    return list(found)


def read(path: Path) -> RankTrace:
    """One rank's trace. Raises ValueError if farandole did not write it."""
    events = _events(path)
    about = next((e.get("args") for e in events if e.get("name") == "farandole"), None)
    if not isinstance(about, dict) or not about.keys() >= _MEMBERS:
        raise ValueError(f"{path} is not a trace of farandole")
    # An offset within the error of its measurement counts as 0: one host has one clock.
    offset = about["clock_ns"] if abs(about["clock_ns"]) > about["clock_error_ns"] else 0
    for event in events:
        if offset and "ts" in event:
            event["ts"] -= offset / 1000
    return RankTrace(about["rank"], about["size"], events)


def merge(traces: Sequence[RankTrace], out: Path) -> int:
    """Writes one trace of all ranks, starting at time 0; returns the number of events."""
    start = min((e["ts"] for t in traces for e in t.events if "ts" in e), default=0.0)
    events = [
        {**event, "ts": round(event["ts"] - start, 3)} if "ts" in event else event
        for trace in traces
        for event in trace.events
    ]
    out.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return len(events)
