# SPDX-License-Identifier: Apache-2.0
"""Traces of several ranks: reading, merging into one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RankTrace", "merge", "read", "siblings"]

Event = dict[str, Any]


@dataclass
class RankTrace:
    """One rank's trace; times are microseconds of the first rank's monotonic clock."""

    rank: int
    size: int
    events: list[Event]


def siblings(path: Path) -> list[Path]:
    """The traces of all ranks of the run whose rank 0 wrote `path`."""
    name = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix))
    others = (p for p in path.parent.iterdir() if name.fullmatch(p.name))
    return [path, *sorted(others, key=lambda p: int(re.findall(r"\.rank(\d+)", p.name)[-1]))]


def _events(path: Path) -> list[Event]:
    """Of a trace that may end anywhere: a killed rank closes no brackets."""
    text = path.read_text(errors="replace")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        whole = text[: text.rindex("}") + 1] if "}" in text else "["
        lines = whole.split("\n")
        try:
            found = json.loads("\n".join(lines).rstrip(",") + "]")
        except json.JSONDecodeError:  # cut inside the last event
            found = json.loads("\n".join(lines[:-1]).rstrip(",") + "]")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path} is no trace of one rank (give rank 0's own, not a merged one)")
    return list(found)


def read(path: Path) -> RankTrace:
    """One rank's trace. Raises ValueError if farandole has not written it."""
    events = _events(path)
    about = next((e["args"] for e in events if e.get("name") == "farandole"), None)
    if about is None:
        raise ValueError(f"{path} is no trace of farandole")
    # An offset within what the measurement can tell is none: one host has one clock.
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
