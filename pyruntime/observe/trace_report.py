# SPDX-License-Identifier: Apache-2.0
"""How a step's time was spent, from the traces of all ranks: a table and a plot. For `farandole
trace report`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from farandole.observe.trace import Event, RankTrace

Spans = list[tuple[float, float]]  # begin and end, microseconds, ascending


@dataclass(frozen=True)
class Step:
    """One step of one rank; milliseconds."""

    rank: int
    begin: float
    time: float
    waiting: float  # the thread that submits was blocked
    moving: float  # a bucket was under way
    hidden: float  # of that, while no caller waited: overlapped with computing
    negotiating: float  # median over the step's tensors, submit to decision
    queued: float  # median, decision to the bucket's launch
    packing: float
    reducing: float
    unpacking: float

    @property
    def overlap(self) -> float:
        """Share of the moving time overlapped with computing, 0 to 1; 0 if nothing moved."""
        return self.hidden / self.moving if self.moving else 0.0


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _clip(spans: Spans, begin: float, end: float) -> Spans:
    return [(max(b, begin), min(e, end)) for b, e in spans if e > begin and b < end]


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def _common(a: Spans, b: Spans) -> float:
    return _length(a) + _length(b) - _length(_union([*a, *b]))


def _slices(events: Sequence[Event], category: str, name: str = "") -> Spans:
    return sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["cat"] == category and name in ("", e["name"])
    )


def _stages(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """(start, duration) of each tensor's NEGOTIATE, QUEUE and MOVE."""
    begun: dict[tuple[int, str], float] = {}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] not in "be" or event.get("cat") != "tensor":
            continue
        key = event["id"], event["name"]
        if event["ph"] == "b":
            begun[key] = event["ts"]
        elif key in begun:
            begin = begun.pop(key)
            found[event["name"].split("_")[0]].append((begin, event["ts"] - begin))
    return found


def _boundaries(trace: RankTrace) -> list[float]:
    """When each step starts: at each submission of the most frequent tensor."""
    submits = [e for e in trace.events if e["ph"] == "X" and e["cat"] == "submit"]
    counts = Counter(e["name"] for e in submits)
    if not counts:
        return []
    name = counts.most_common(1)[0][0]  # of equally frequent ones, the first that was seen
    return sorted(e["ts"] for e in submits if e["name"] == name)


def analyse(trace: RankTrace) -> list[Step]:
    """The steps of one rank, from one submission of its most frequent tensor to the next."""
    events = trace.events
    waits, buckets = (_union(_slices(events, category)) for category in ("wait", "bucket"))
    blocks = {name: _slices(events, "block", name) for name in ("pack", "reduce", "unpack")}
    stages = _stages(events)

    def middle(stage: str, begin: float, end: float) -> float:
        return median([d for b, d in stages[stage] if begin <= b < end] or [0.0])

    steps = []
    bounds = _boundaries(trace)
    for begin, end in pairwise(bounds):
        waiting, moving = _clip(waits, begin, end), _clip(buckets, begin, end)
        times = (
            end - begin,
            _length(waiting),
            _length(moving),
            _length(moving) - _common(waiting, moving),
            middle("NEGOTIATE", begin, end),
            middle("QUEUE", begin, end),
            *(_length(_clip(blocks[name], begin, end)) for name in blocks),
        )
        steps.append(Step(trace.rank, begin / 1000, *(t / 1000 for t in times)))
    return steps


_COLUMNS = {
    "time": "step",
    "waiting": "wait",
    "moving": "move",
    "negotiating": "agree",
    "queued": "queue",
    "packing": "pack",
    "reducing": "reduce",
    "unpacking": "unpack",
}


def show(steps: dict[int, list[Step]], console: Console) -> None:
    """Prints medians over the steps of each rank, and a conclusion."""
    title = "one step, median over all, milliseconds"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))  # 80 columns are enough
    for heading in ("rank", "steps", *_COLUMNS.values(), "overlap"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, own in sorted(steps.items()):
        middle = [median(getattr(s, column) for s in own) for column in _COLUMNS]
        cells = [f"{ms:.2f}" if ms < 100 else f"{ms:.1f}" for ms in middle]
        overlap = f"{100 * median(s.overlap for s in own):.0f} %"
        table.add_row(str(rank), str(len(own)), *cells, overlap)
    console.print(table)
    console.print(_conclusion(steps))
    console.print(
        "wait: a caller was blocked. move: buckets were under way. agree, queue: a tensor's time "
        "until all were ready, until its bucket started. overlap: share of move without wait."
    )


def _conclusion(steps: dict[int, list[Step]]) -> str:
    """Who is the slowest, if the steps differ by more than they vary."""
    shares = {rank: sorted(s.waiting / s.time for s in own) for rank, own in steps.items()}
    middle = {rank: 100 * median(own) for rank, own in shares.items()}
    if len(steps) == 1:
        return f"The rank waits {next(iter(middle.values())):.0f} % of its step."
    least, next_least = sorted(middle, key=lambda rank: middle[rank])[:2]
    most = max(middle.values())
    if _bounds(shares[least])[1] < _bounds(shares[next_least])[0]:
        return (
            f"Slowest: rank {least}, which waits least ({middle[least]:.0f} % of its step; the "
            f"others up to {most:.0f} %)."
        )
    return (
        f"No rank is clearly the slowest: they wait {middle[least]:.0f} to {most:.0f} % of a step, "
        "and steps vary by more than the ranks differ."
    )


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median lies with 95 %: order statistics of ascending values."""
    margin = 0.98 * math.sqrt(len(values)) + 0.5
    if len(values) < 2 * margin:
        return -math.inf, math.inf  # too few to say
    return values[math.floor(len(values) / 2 - margin)], values[
        math.ceil(len(values) / 2 + margin) - 1
    ]


def _parts(own: Sequence[Step]) -> list[float]:
    """_PARTS of a rank's median step, as the table has it."""
    time, waiting = (median(getattr(s, what) for s in own) for what in ("time", "waiting"))
    hidden = min(median(s.hidden for s in own), max(time - waiting, 0.0))
    return [max(time - waiting - hidden, 0.0), hidden, min(waiting, time)]


# The parts of a step: name, colour.
_PARTS = (
    ("computing only", "#4c72b0"),
    ("computing, buckets move meanwhile", "#55a868"),
    ("waiting", "#c44e52"),
)


def plot(steps: dict[int, list[Step]], out: Path) -> None:
    """Plots the parts of a median step of each rank, and each step's time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    ranks = sorted(steps)
    names = [f"rank {rank}" for rank in ranks]
    left = [0.0] * len(ranks)
    for (label, colour), widths in zip(
        _PARTS, zip(*(_parts(steps[rank]) for rank in ranks), strict=True), strict=True
    ):
        bars.barh(names, widths, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("ms of a median step")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small")
    for rank in ranks:
        lines.plot([step.time for step in steps[rank]], label=f"rank {rank}", linewidth=1)
    lines.set_xlabel("step")
    lines.set_ylabel("ms")
    lines.set_ylim(bottom=0)
    lines.legend(fontsize="small")
    figure.savefig(out, dpi=120)
