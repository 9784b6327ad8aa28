# SPDX-License-Identifier: Apache-2.0
"""Plots bandwidth over size from the output of `farandole bench --json FILE`.

python benchmarks/bench_plot.py build/bench/bench2.json docs/bench.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.tools.bench_report import size_text


def plot(path: Path, results: Sequence[dict[str, Any]], title: str) -> None:
    """Plots bus bandwidth over size: a panel per collective and dtype, a line per peer."""
    from matplotlib.figure import Figure

    panels = sorted({(r["collective"], r["dtype"]) for r in results})
    figure = Figure(figsize=(7.5 * len(panels), 5), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        rows = [r for r in results if (r["collective"], r["dtype"]) == panel]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ends = []
        for peer in dict.fromkeys(r["peer"] for r in rows):
            line = [(r["bytes"], r["busbw"] / 1e9) for r in rows if r["peer"] == peer]
            (drawn,) = axes.plot(*zip(*line, strict=True), "o-")
            ends.append((*line[-1], peer, drawn.get_color()))
        label_ends(axes, ends)
        axes.set_title(f"{panel[0]} {panel[1]}, ranks: {title}")
        axes.set_xlabel("size")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=200)


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names (x, y, name, colour) next to the ends of lines, and moves close ones apart."""
    axes.set_ylim(axes.get_ylim())
    within = axes.transData + axes.transAxes.inverted()
    ordered = sorted(ends, key=lambda end: end[1])
    places = [within.transform((x, y))[1] for x, y, _, _ in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + 0.06)
    places[-1] = min(places[-1], 1.0)
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - 0.06)
    for place, (_, _, name, colour) in zip(places, ordered, strict=True):
        axes.text(1.01, place, name, color=colour, va="center", transform=axes.transAxes)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    plot(Path(sys.argv[2]), found["results"], found["settings"]["ranks"])
