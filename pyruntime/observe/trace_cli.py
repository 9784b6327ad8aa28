# SPDX-License-Identifier: Apache-2.0
"""`farandole trace merge` and `farandole trace report`, for the command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from farandole.errors import counted
from farandole.observe import trace, trace_report
from farandole.output import console, why_no_plot, why_not

_EXAMPLES = """\
examples:
  FARANDOLE_TIMELINE=run.json mpirun -np 2 python train.py
  farandole trace merge run.json                    # run.merged.json, for https://ui.perfetto.dev
  farandole trace report run.json --plot run.png    # where the time of a step went
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `farandole trace`."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
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
    trace_report.show(steps, console())
    if plot is not None:
        trace_report.plot(steps, plot)
        print(plot)
    return 0


def run(options: argparse.Namespace) -> int:
    """Merge the traces that the ranks wrote, or report what they say."""
    plot = options.plot if options.action == "report" else None
    if refused := why_no_plot(plot) or why_not(getattr(options, "output", None)):
        print(f"farandole trace: {refused}", file=sys.stderr)
        return 2
    try:
        traces = [trace.read(path) for path in trace.siblings(options.path)]
    except (OSError, ValueError) as reason:
        print(f"farandole trace: {reason}", file=sys.stderr)
        return 1
    if missing := traces[0].size - len(traces):
        print(
            f"{missing} of {counted(traces[0].size, 'rank')} wrote no trace here", file=sys.stderr
        )
    if options.action == "report":
        return _report(traces, plot)
    path: Path = options.path
    out: Path = options.output or path.with_name(f"{path.stem}.merged{path.suffix}")
    count = trace.merge(traces, out)
    print(
        f"{out}: {counted(count, 'event')} of {counted(len(traces), 'rank')}; open it in https://ui.perfetto.dev"
    )
    return 0
