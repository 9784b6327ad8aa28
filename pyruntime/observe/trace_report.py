# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step went, from the traces of all ranks: a table and a picture."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from farandole.observe.trace import Event, RankTrace

__all__ = ["Step", "analyse", "plot", "show"]

Spans = list[tuple[float, float]]  # begin and end, microseconds, ascending


@dataclass(frozen=True)
class Step:
    """One step of one rank; milliseconds."""

    rank: int
    begin: float
    time: float
    waiting: float  # the thread that submits was blocked
    moving: float  # a bucket was on its way
    hidden: float  # of that, while nobody waited: beside the backward pass
    negotiating: float  # median over the step's tensors, submit to decision
    queued: float  # median, decision to the bucket's launch
    packing: float
    reducing: float
    unpacking: float

    @property
    def overlap(self) -> float:
        """Share of the moving time that computing hid, 0 to 1; 0 if nothing moved."""
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
    """(begin, duration) of each tensor's NEGOTIATE, QUEUE and MOVE."""
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
    """When each step begins: the tensor that comes most often, and first, comes again."""
    submits = [e for e in trace.events if e["ph"] == "X" and e["cat"] == "submit"]
    counts = Counter(e["name"] for e in submits)
    if not counts:
        return []
    name = counts.most_common(1)[0][0]  # of several, the first that was seen
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
    """A table of medians over the steps of each rank, and what it means."""
    table = Table(title="one step, median over all, milliseconds", box=SIMPLE)
    for heading in ("rank", "steps", *_COLUMNS.values(), "overlap"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, own in sorted(steps.items()):
        cells = [f"{median(getattr(s, column) for s in own):.2f}" for column in _COLUMNS]
        overlap = f"{100 * median(s.overlap for s in own):.0f} %"
        table.add_row(str(rank), str(len(own)), *cells, overlap)
    console.print(table)
    waiting = {rank: median(s.waiting / s.time for s in own) for rank, own in steps.items()}
    slowest = min(waiting, key=lambda rank: waiting[rank])
    console.print(
        f"Slowest: rank {slowest}, which waits least ({100 * waiting[slowest]:.0f} % of its step; "
        f"the others up to {100 * max(waiting.values()):.0f} %)."
        if len(waiting) > 1
        else f"The rank waits {100 * waiting[slowest]:.0f} % of its step."
    )
    console.print(
        "wait: a caller was blocked. move: buckets were under way. agree, queue: a tensor's time "
        "until all were ready, until its bucket began. overlap: share of move without wait."
    )


# What a step consists of, and how it is drawn.
_PARTS: tuple[tuple[str, Callable[[Step], float], str], ...] = (
    ("computing only", lambda step: step.time - step.waiting - step.hidden, "#4c72b0"),
    ("computing, buckets move beside", lambda step: step.hidden, "#55a868"),
    ("waiting", lambda step: step.waiting, "#c44e52"),
)


def plot(steps: dict[int, list[Step]], out: Path) -> None:
    """A picture: the parts of a median step of each rank, and each step's time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    ranks = sorted(steps)
    names = [f"rank {rank}" for rank in ranks]
    left = [0.0] * len(ranks)
    for label, part, colour in _PARTS:
        widths = [median(part(step) for step in steps[rank]) for rank in ranks]
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
