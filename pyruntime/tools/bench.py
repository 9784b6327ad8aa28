# SPDX-License-Identifier: Apache-2.0
"""`farandole bench`: measures the collectives on all ranks."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import farandole
from farandole.output import int_at_least, rank_zero_printer, why_unwritable
from farandole.tools import bench_cases
from farandole.tools.bench_cases import Case
from farandole.trust import write_file

EXAMPLES = """\
examples:
  mpirun -np 4 --bind-to none farandole bench
  mpirun -np 4 --bind-to none farandole bench -b 4 -e 64M -f 4096 --peers zerocopy,gloo,mpi
  mpirun -np 2 --bind-to none farandole bench --collectives allgather --dtypes float16
  mpirun -np 2 --bind-to none farandole bench -b 1K -e 256M -f 2 --json out.json

Columns: size is a rank's largest buffer. Times are of one blocking call, averaged over the ranks.
algbw = size / median. busbw scales algbw to the traffic on the links, as nccl-tests defines it.
wrong counts wrong elements in each turn's first call; any makes the command fail. Peers take turns
in one run, so their ratios hold on a noisy machine. zerocopy is farandole on arrays from
farandole.empty(). mpi skips 16-bit floats, which MPI lacks.
"""


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4, 64K, 1M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    collectives, dtypes = list(bench_cases.COLLECTIVES), list(bench_cases.DTYPES)
    for option, known, usual in (
        ("--collectives", collectives, "allreduce"),
        ("--dtypes", dtypes, "float32"),
    ):
        add(option, type=_names(known), default=[usual], metavar="LIST", help=", ".join(known))
    add("-b", "--begin", type=_size, default=4, metavar="SIZE", help="smallest (4)")
    add("-e", "--end", type=_size, default=64 << 20, metavar="SIZE", help="largest (64M)")
    add(
        "-f", "--factor", type=int_at_least(2), default=8, metavar="N", help="between two sizes (8)"
    )
    add("-n", "--calls", type=int_at_least(1), metavar="N", help="timed calls (6 to 1000, by size)")
    peers = ["zerocopy", "gloo", "mpi"]
    text = "compared with farandole: " + ", ".join(peers)
    add("--peers", type=_names(peers), default=[], metavar="LIST", help=text)
    add("--json", type=Path, metavar="FILE", help="settings and rows as JSON")


def _steps(begin: int, end: int, factor: int) -> list[int]:
    sizes = [max(begin, 1)]
    while sizes[-1] * factor <= end:
        sizes.append(sizes[-1] * factor)
    return sizes


def _need(package: str, option: str) -> None:
    """Exits the command, before any measurement, if a package is missing."""
    if importlib.util.find_spec(package) is None:
        sys.exit(f"farandole bench {option} needs {package}: pip install {package}")


def run(options: argparse.Namespace) -> int:
    """Measure the collectives, and other libraries for comparison; fail if a result is wrong."""
    from farandole.tools import bench_peers, bench_report, bench_timing

    if options.begin > options.end:
        begin, end = (bench_report.size_text(size) for size in (options.begin, options.end))
        print(f"farandole bench: --begin {begin} is above --end {end}", file=sys.stderr)
        return 2
    if "gloo" in options.peers:
        _need("torch", "--peers gloo")
    bench_timing.init_or_explain()
    rank, size = farandole.rank(), farandole.size()
    if bench_timing.is_refused("bench", lambda: why_unwritable(options.json)):
        return 2
    out = rank_zero_printer(rank)
    if size == 1:
        out("# one rank: no data moves, so these times measure the calls only")
    peers = [bench_peers.PEERS[name]() for name in ("farandole", *options.peers)]
    values = bench_report.settings()
    bench_report.print_settings(out, values)
    sizes = _steps(options.begin, options.end, options.factor)
    cases = [
        Case.of(collective, dtype, nbytes, rank, size)
        for collective in options.collectives
        for dtype in options.dtypes
        for nbytes in sizes
    ]
    results = []
    bench_report.print_head(out)
    for case in dict.fromkeys(cases):
        calls = options.calls or bench_timing.calls_for(case.nbytes)
        results += (row := bench_timing.measure(case, peers, calls))
        bench_report.print_rows(out, row)
    if rank == 0 and options.json is not None:
        write_file(options.json, bench_report.as_json(values, results).encode(), 0o666)
    wrong = sum(r.wrong for r in results)
    out(f"# wrong: {wrong}")
    for peer in peers:
        peer.close()
    farandole.shutdown()
    return int(wrong > 0)
