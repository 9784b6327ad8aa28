# SPDX-License-Identifier: Apache-2.0
"""How `farandole bench` tells: settings, a table that grows, JSON, a plot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

import farandole
from farandole._library import lib, text
from farandole.tools.bench_timing import Result

__all__ = ["Table", "as_json", "console", "plot", "print_settings", "settings", "size_text"]

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


def console(rank: int, size: int) -> Console:
    """Rank 0 prints. Under a launcher a rank's terminal is a pretended one, without a width."""
    terminal = None if size == 1 else False
    return Console(width=140, quiet=rank != 0, highlight=False, force_terminal=terminal)


def size_text(nbytes: int) -> str:
    """`1536` -> `1.5K`."""
    for unit, width in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << width:
            return f"{nbytes / (1 << width):.4g}{unit}"
    return f"{nbytes}B"


# ---- settings


def settings() -> dict[str, Any]:
    """Versions, ranks and what the environment sets: what a number depends on. Collective."""
    from mpi4py import MPI

    bound = farandole.allgather_object(len(os.sched_getaffinity(0)))
    found = {"farandole": f"{farandole.__version__}, core {text(lib.farandole_build_id())}"}
    found["MPI"] = MPI.Get_library_version().split("\n")[0].split("\x00")[0].split(",")[0]
    found["python"] = platform.python_version()
    for package in ("mpi4py", "numpy", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    prefixes = ("FARANDOLE_", "HOROVOD_", "OMP_", "OMPI_MCA_mpi_yield", "PRTE_MCA_hwloc", "GLOO_")
    return {
        **found,
        "ranks": f"{farandole.size()} on {farandole.cross_size()} host(s)",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores; each rank may use {bound}",
        "load": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
    }


def print_settings(out: Console, values: dict[str, Any]) -> None:
    """One line each."""
    for name, value in values.items():
        shown = " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        out.print(f"# {name}: {shown}", markup=False, soft_wrap=True)


# ---- the table


class Table:
    """Prints rows as they come; above a progress bar where there is a terminal."""

    def __init__(self, out: Console, cases: int) -> None:
        """`cases`: how many advance() calls will come."""
        self._out = out
        self._progress = Progress(console=out, transient=True, disable=not out.is_terminal)
        self._task = self._progress.add_task("cases", total=cases)

    @contextmanager
    def shown(self) -> Iterator[Table]:
        """Head first."""
        with self._progress:
            self._print([(name, "bold") for name in _COLUMNS])
            yield self

    def advance(self, results: Sequence[Result]) -> None:
        """Prints one case."""
        for result in results:
            self._print(self._cells(result))
        self._progress.advance(self._task)

    def _cells(self, r: Result) -> list[tuple[str, str]]:
        us = [f"{1e6 * seconds:.1f}" for seconds in (r.minimum, r.median, r.p99)]
        rates = [f"{rate / 1e9:.3g}" for rate in (r.algbw, r.busbw)]
        plain = [r.case.collective.name, r.case.dtype, size_text(r.case.nbytes), r.peer]
        plain += [str(len(r.seconds)), *us, *rates]
        style = "bold" if r.peer == "farandole" else ""
        return [(x, style) for x in plain] + [(str(r.wrong), "bold red" if r.wrong else "")]

    def _print(self, cells: Sequence[tuple[str, str]]) -> None:
        line = Text()
        for (cell, style), (name, width) in zip(cells, _COLUMNS.items(), strict=True):
            padded = cell.ljust(width) if name in _LEFT else cell.rjust(width)
            line.append(padded + "  ", style)
        line.rstrip()
        self._out.print(line, soft_wrap=True)


# ---- files


def as_json(values: dict[str, Any], results: Sequence[Result]) -> str:
    """Settings and rows; times in seconds, rates in bytes per second."""
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
    """Size against bus bandwidth, one panel for each collective and dtype, a line for each peer."""
    from matplotlib.figure import Figure

    panels = sorted({(r.case.collective.name, r.case.dtype) for r in results})
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        rows = [r for r in results if (r.case.collective.name, r.case.dtype) == panel]
        for peer in dict.fromkeys(r.peer for r in rows):
            line = [(r.case.nbytes, r.busbw / 1e9) for r in rows if r.peer == peer]
            style = "--" if peer == "limit" else "o-"
            axes.plot(*zip(*line, strict=True), style, label=peer)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{panel[0]} {panel[1]}, {rows[0].case.size} ranks")
        axes.set_xlabel("size")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
