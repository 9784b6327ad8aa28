# SPDX-License-Identifier: Apache-2.0
"""`farandole trace merge` and `farandole trace report`."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from farandole.observe import trace, trace_report

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole trace`."""
    actions = parser.add_subparsers(dest="action", required=True)
    merge = actions.add_parser("merge", help="one trace of all ranks")
    report = actions.add_parser("report", help="where the time of a step went")
    for action in (merge, report):
        action.add_argument("path", type=Path, help="rank 0's trace; the others lie beside it")
    merge.add_argument("-o", "--output", type=Path, help="default: NAME.merged.SUFFIX")
    report.add_argument("--plot", type=Path, help="picture to write (PNG, SVG, PDF)")


def _report(traces: list[trace.RankTrace], plot: Path | None) -> int:
    steps = {t.rank: s for t in traces if (s := trace_report.analyse(t))}
    if not steps:
        print("no tensor comes twice in these traces: there is no step to see", file=sys.stderr)
        return 1
    width = max(100, shutil.get_terminal_size().columns)
    trace_report.show(steps, Console(width=width))
    if plot is not None:
        try:
            trace_report.plot(steps, plot)
        except ImportError as reason:
            print(f"no plot: {reason}; remedy: pip install matplotlib", file=sys.stderr)
            return 1
        print(plot)
    return 0


def run(options: argparse.Namespace) -> int:
    """Merge the traces that the ranks wrote, or report what they say."""
    try:
        traces = [trace.read(path) for path in trace.siblings(options.path)]
    except (OSError, ValueError) as reason:
        print(reason, file=sys.stderr)
        return 1
    if missing := traces[0].size - len(traces):
        print(f"{missing} of {traces[0].size} ranks wrote no trace here", file=sys.stderr)
    if options.action == "report":
        return _report(traces, options.plot)
    path: Path = options.path
    out: Path = options.output or path.with_name(f"{path.stem}.merged{path.suffix}")
    count = trace.merge(traces, out)
    print(f"{out}: {count} events of {len(traces)} ranks; open it in https://ui.perfetto.dev")
    return 0
