# SPDX-License-Identifier: Apache-2.0
"""Implements the subcommands `farandole dump` and `farandole explain`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from farandole.errors import error_text
from farandole.observe import flight
from farandole.observe.explain import explain

EXAMPLES = """\
examples:
  farandole dump                            # the only job of this user on this host
  farandole dump 4242 --into flight         # the job of this process
  farandole explain flight                  # what went wrong first

FARANDOLE_FLIGHT_DIR=flight makes a job write the same files on errors and stalls.
"""


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `farandole dump`."""
    parser.add_argument("pids", nargs="*", type=int, help="any processes of the job (default: all)")
    parser.add_argument("--into", type=Path, default=Path("flight"), help="folder for the dumps")


def run_dump(options: argparse.Namespace) -> int:
    """Write the flight recorders of a running job on this host, without disturbing it."""
    jobs = flight.jobs_of(options.pids)
    if len(jobs) != 1:
        found = "; ".join(f"processes {', '.join(map(str, job.pids))}" for job in jobs)
        print(
            f"{len(jobs)} jobs found ({found}): name a process of one of them"
            if jobs
            else f"farandole dump: {flight.why_no_job(options.pids)}",
            file=sys.stderr,
        )
        return 1
    flight.dump(jobs[0], options.into, "requested by `farandole dump`")
    for page in _read(options.into):
        print(f"{options.into}/flight-rank-{page['rank']}.json  {page['state']}")
    return 0


def _read(folder: Path) -> list[flight.Page]:
    """Returns the last job's dumps. If they can't be read, prints the reason and returns []."""
    try:
        found = flight.read_dumps(folder)
    except (OSError, ValueError) as reason:
        print(error_text(reason), file=sys.stderr)
        return []
    dumps = flight.of_last_job(found)
    if older := len(found) - len(dumps):
        print(f"skipped {older} in {folder}: an earlier job wrote them", file=sys.stderr)
    return dumps


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `farandole explain`."""
    parser.add_argument("folder", type=Path, help="folder with flight-rank-N.json files")


def run_explain(options: argparse.Namespace) -> int:
    """Say what went wrong first, from all ranks' flight recorder dumps."""
    worlds = flight.worlds_of(options.folder)
    pages = [found for folder in worlds or [options.folder] if (found := _read(folder))]
    for i, dumps in enumerate(pages):
        # If a world is older than the one before, it belongs to an earlier job.
        if i > 0 and flight.began(dumps) < flight.began(pages[i - 1]):
            break
        try:
            print("\n".join(([""] if i > 0 else []) + explain(dumps)))
        except (LookupError, TypeError, AttributeError, ValueError) as reason:
            print(f"the dumps of world {i} were not written by farandole: {reason!r}")
            return 1
    return 0 if pages else 1
