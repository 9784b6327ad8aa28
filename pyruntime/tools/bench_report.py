# SPDX-License-Identifier: Apache-2.0
"""The output of `farandole bench`: settings, a table that grows, JSON, a plot."""

from __future__ import annotations

import io
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import farandole
from farandole._library import lib, text
from farandole.errors import counted
from farandole.installed import mpi_library, version
from farandole.tools.bench_timing import Result
from farandole.trust import write_file

_COLUMNS = {
    "collective": 13,
    "dtype": 8,
    "size": 8,
    "peer": 9,
    "calls": 5,
    "min us": 10,
    "median us": 10,
    "p99 us": 10,
    "algbw GB/s": 10,
    "busbw GB/s": 10,
    "wrong": 5,
}
_LEFT = ("collective", "dtype", "peer")
_PACKAGES = ("mpi4py", "numpy", "torch")


def size_text(nbytes: int) -> str:
    """`1536` -> `1.5K`."""
    for unit, width in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << width:
            return f"{nbytes / (1 << width):.4g}{unit}"
    return f"{nbytes}B"


# ---- settings


def settings() -> dict[str, Any]:
    """What results depend on: versions, ranks, variables that are set. Collective."""
    bound = farandole.allgather_object(len(os.sched_getaffinity(0)))
    found = {"farandole": f"{farandole.__version__}, core {text(lib.farandole_build_id())}"}
    found |= {"MPI": mpi_library().split(",")[0], "python": platform.python_version()}
    found |= {package: number for package in _PACKAGES if (number := version(package))}
    prefixes = ("FARANDOLE_", "HOROVOD_", "OMP_", "OMPI_MCA_mpi_yield", "PRTE_MCA_hwloc", "GLOO_")
    return {
        **found,
        "ranks": f"{farandole.size()} on {counted(farandole.cross_size(), 'host')}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores; each rank may use {bound}",
        "load": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
    }


def print_settings(out: Console, values: dict[str, Any]) -> None:
    """Prints one line per setting."""
    for name, value in values.items():
        shown = " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        out.print(f"# {name}: {shown}", markup=False, soft_wrap=True)


# ---- the table


def print_head(out: Console) -> None:
    """Prints the head of the table."""
    _print(out, [(name, "bold") for name in _COLUMNS])


def print_rows(out: Console, results: Sequence[Result]) -> None:
    """Prints the rows of one case."""
    for r in results:
        us = [f"{1e6 * seconds:.1f}" for seconds in (r.minimum, r.median, r.p99)]
        rates = [f"{rate / 1e9:.3g}" for rate in (r.algbw, r.busbw)]
        plain = [r.case.collective.name, r.case.dtype, size_text(r.case.nbytes), r.peer]
        plain += [str(len(r.seconds)), *us, *rates]
        style = "bold" if r.peer == "farandole" else ""
        wrong = str(r.wrong), "bold red" if r.wrong else ""
        _print(out, [*((x, style) for x in plain), wrong])


def _print(out: Console, cells: Sequence[tuple[str, str]]) -> None:
    line = Text()
    for (cell, style), (name, width) in zip(cells, _COLUMNS.items(), strict=True):
        padded = cell.ljust(width) if name in _LEFT else cell.rjust(width)
        line.append(padded + "  ", style)
    line.rstrip()
    out.print(line, soft_wrap=True)


# ---- files


def as_json(values: dict[str, Any], results: Sequence[Result]) -> str:
    """Settings and rows as JSON; times in seconds, rates in bytes per second."""
    rows = [
        {
            "collective": r.case.collective.name,
            "dtype": r.case.dtype,
            "bytes": r.case.nbytes,
            "peer": r.peer,
            "calls": len(r.seconds),
            "min": r.minimum,
            "median": r.median,
            "p99": r.p99,
            "algbw": r.algbw,
            "busbw": r.busbw,
            "wrong": r.wrong,
        }
        for r in results
    ]
    return json.dumps({"settings": values, "results": rows}, indent=1)


def plot(path: Path, results: Sequence[Result]) -> None:
    """Plots bus bandwidth over size: a panel per collective and dtype, a line per peer."""
    from matplotlib.figure import Figure

    panels = sorted({(r.case.collective.name, r.case.dtype) for r in results})
    figure = Figure(figsize=(7.5 * len(panels), 5), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        rows = [r for r in results if (r.case.collective.name, r.case.dtype) == panel]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ends = []
        for peer in dict.fromkeys(r.peer for r in rows):
            line = [(r.case.nbytes, r.busbw / 1e9) for r in rows if r.peer == peer]
            style = "--" if peer == "numpy" else "o-"
            (drawn,) = axes.plot(*zip(*line, strict=True), style)
            ends.append((*line[-1], peer, drawn.get_color()))
        label_ends(axes, ends)
        axes.set_title(f"{panel[0]} {panel[1]}, {rows[0].case.size} ranks")
        axes.set_xlabel("size")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=200)
    write_file(path, picture.getvalue(), 0o666)


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names (x, y, name, colour) right of the ends of lines, apart where these are close."""
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
