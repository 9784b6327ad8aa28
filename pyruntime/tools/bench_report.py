# SPDX-License-Identifier: Apache-2.0
"""Prints the results of `farandole bench`: settings, table rows, JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import farandole
from farandole._library import lib, text
from farandole.errors import counted
from farandole.installed import mpi_library, version
from farandole.output import PrintLine
from farandole.tools.bench_timing import Measurement

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
    """Formats a number of bytes. For example, 1536 becomes "1.5K"."""
    for unit, width in (("G", 30), ("M", 20), ("K", 10)):
        if nbytes >= 1 << width:
            return f"{nbytes / (1 << width):.4g}{unit}"
    return f"{nbytes}B"


# ---- settings


def settings() -> dict[str, Any]:
    """Returns the facts on which results depend: versions, ranks and variables.

    This is a collective.
    """
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


def print_settings(out: PrintLine, values: dict[str, Any]) -> None:
    """Prints one line per setting."""
    for name, value in values.items():
        shown = " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        out(f"# {name}: {shown}")


# ---- the table


def print_head(out: PrintLine) -> None:
    """Prints the table's header."""
    _print(out, list(_COLUMNS))


def print_rows(out: PrintLine, results: Sequence[Measurement]) -> None:
    """Prints the rows of one case."""
    for r in results:
        us = [f"{1e6 * seconds:.1f}" for seconds in (r.minimum, r.median, r.p99)]
        rates = [f"{rate / 1e9:.3g}" for rate in (r.algbw, r.busbw)]
        names = [r.case.collective.name, r.case.dtype, size_text(r.case.nbytes), r.peer]
        _print(out, [*names, str(len(r.seconds)), *us, *rates, str(r.wrong)])


def _print(out: PrintLine, cells: Sequence[str]) -> None:
    columns = zip(cells, _COLUMNS.items(), strict=True)
    padded = (
        cell.ljust(width) if name in _LEFT else cell.rjust(width) for cell, (name, width) in columns
    )
    out("  ".join(padded).rstrip())


# ---- a file


def as_json(values: dict[str, Any], results: Sequence[Measurement]) -> str:
    """Returns settings and rows as JSON. Times are in seconds, rates in bytes per second."""
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
