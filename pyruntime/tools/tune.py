# SPDX-License-Identifier: Apache-2.0
"""`farandole tune`: finds the best job-wide settings for this machine and writes them to a file."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import farandole
from farandole.config import usual_file
from farandole.errors import error_text
from farandole.output import int_at_least, rank_zero_printer, why_unwritable
from farandole.tools.bench_timing import init_or_explain, is_refused
from farandole.tools.tune_search import KNOBS, SearchResult, Setting, search
from farandole.trust import write_file

EXAMPLES = """\
examples:
  mpirun -np 4 --bind-to none farandole tune              # as many ranks as the jobs will have
  mpirun -np 4 --bind-to none farandole tune --turns 9 --output tuning.conf

It chooses the block size, then the staging depth, then the fusion threshold. For each it times all
values, interleaved. Last, it times the choice against the defaults again. farandole.init() reads
the file if FARANDOLE_TUNING names it, or if it is in the configuration directory. Environment
variables override the file, and rank 0's values hold for all ranks. Tune on an idle machine.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    text = "measurements per value (5); about 10 s each"
    add("--turns", type=int_at_least(1), default=5, metavar="N", help=text)
    path = usual_file("tuning.conf")  # init() reads this file if FARANDOLE_TUNING is not set
    text = f"file to write ({path or 'none: this user has no home folder'})"
    add("--output", type=Path, default=path, metavar="FILE", help=text)
    text = "write settings only if they are faster than the defaults by this share (0.03)"
    add("--least-gain", type=float, default=0.03, metavar="PART", help=text)
    add("--dry-run", action="store_true", help="write nothing")


def run(options: argparse.Namespace) -> int:
    """Find block size, staging depth and fusion threshold for this machine, and save them."""
    from farandole.tools import bench_report

    init_or_explain()
    rank, size = farandole.rank(), farandole.size()
    if size == 1:
        farandole.shutdown()
        print(
            "farandole tune: there is nothing to tune with one rank; start as many as your jobs "
            "have: mpirun -np 4 --bind-to none farandole tune",
            file=sys.stderr,
        )
        return 2
    if is_refused("tune", lambda: _refusal(options)):
        return 2
    out = rank_zero_printer(rank)
    bench_report.print_settings(out, bench_report.settings())
    farandole.shutdown()
    found = search(options.turns, out)
    out(_verdict(found, options.least_gain))
    if rank == 0 and not options.dry_run:
        kept = found.settings if found.gain >= options.least_gain else ()
        write_file(options.output, file_text(kept, found, size).encode(), 0o644)
        out(f"written: {options.output}")
    return 0


def _refusal(options: argparse.Namespace) -> str:
    if options.dry_run:
        return ""
    if options.output is None:
        return "this user has no home folder; remedy: pass --output FILE, or set HOME"
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        return error_text(reason)
    return why_unwritable(options.output)


def _verdict(found: SearchResult, least: float) -> str:
    if found.gain < least:
        return f"The defaults are good here: nothing gained more than {100 * least:.0f} %."
    words = ", ".join(f"{name}={value}" for name, value in found.settings)
    return f"{words}: {100 * found.gain:.0f} % faster than the defaults."


def file_text(settings: Sequence[Setting], found: SearchResult, ranks: int) -> str:
    """Returns the text of the file, with the measurements as comments."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        f"# farandole {farandole.__version__} tune, {today}: {ranks} ranks on "
        f"{os.cpu_count()} cores, {platform.machine()}",
    ]
    if settings:
        lines += [f"# {100 * found.gain:.0f} % faster than the defaults"]
        lines += [f"{name} = {value}" for name, value in settings]
    else:
        lines += [f"# the defaults of {', '.join(KNOBS)} are as good as any"]
    return "\n".join([*lines, ""])
