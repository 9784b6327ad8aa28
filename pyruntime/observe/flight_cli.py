# SPDX-License-Identifier: Apache-2.0
"""`farandole dump`, `farandole explain` and `farandole export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from farandole.observe import flight
from farandole.observe.explain import explain
from farandole.observe.torch_trace import export

__all__ = [
    "add_dump_arguments",
    "add_explain_arguments",
    "add_export_arguments",
    "run_dump",
    "run_explain",
    "run_export",
]


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole dump`."""
    parser.add_argument("pids", nargs="*", type=int, help="any processes of the job (default: all)")
    parser.add_argument("--into", type=Path, default=Path("flight"), help="folder for the dumps")


def run_dump(options: argparse.Namespace) -> int:
    """Write the flight recorders of a running job on this host, without disturbing it."""
    jobs = flight.jobs_of(options.pids)
    if len(jobs) != 1:
        found = "; ".join(f"processes {', '.join(map(str, job.pids))}" for job in jobs)
        print(
            f"{len(jobs)} jobs found ({found}): name a process of the one you mean"
            if jobs
            else "no running farandole job found: is it yours, on this host, and after init()?",
            file=sys.stderr,
        )
        return 1
    flight.dump(jobs[0], options.into, "asked for by `farandole dump`")
    for page in _read(options.into):
        print(f"{options.into}/flight-rank-{page['rank']}.json  {page['state']}")
    return 0


def _read(folder: Path) -> list[flight.Page]:
    """The last job's dumps; none, and the reason on stderr, where they can't be read."""
    try:
        found = flight.read_dumps(folder)
    except (FileNotFoundError, ValueError) as reason:
        print(reason, file=sys.stderr)
        return []
    dumps = flight.of_last_job(found)
    if older := len(found) - len(dumps):
        print(f"left out: {older} in {folder}, of an earlier job", file=sys.stderr)
    return dumps


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole explain`."""
    parser.add_argument("folder", type=Path, help="with flight-rank-N.json files")


def run_explain(options: argparse.Namespace) -> int:
    """Say in words what went wrong first, from all ranks' flight recorder dumps."""
    dumps = _read(options.folder)
    if not dumps:
        return 1
    print("\n".join(explain(dumps)))
    return 0


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole export`."""
    parser.add_argument("folder", type=Path, help="with flight-rank-N.json files")
    parser.add_argument("prefix", help="of the files to write: PREFIX0, PREFIX1, ...")


def run_export(options: argparse.Namespace) -> int:
    """Rewrite dumps in PyTorch Flight Recorder's format, for its analyser (torchfrtrace)."""
    dumps = _read(options.folder)
    if not dumps:
        return 1
    for path in export(dumps, options.prefix):
        print(path)
    return 0
