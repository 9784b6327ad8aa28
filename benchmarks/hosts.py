# SPDX-License-Identifier: Apache-2.0
"""Compares farandole, raw MPI and Gloo on two simulated hosts: time, and bytes on the link.

    python benchmarks/hosts.py [--ranks 2 4] [--rates 1gbit none] [--wires mpi tcp]
                               [--rounds N] [--json FILE]

Hosts are network namespaces (tests/harness/hosts.py; needs root); tc's tbf limits their link's
rate. For each combination of ranks per host and rate, the wires (FARANDOLE_WIRE) alternate, each in
a separate job. A job measures blocking in-place allreduces of float32, the 161 gradients of
ResNet-50, and the cost when it is idle. Peers alternate, and every result is checked.

`wire` is the time the link needs, without acknowledgements: (B + 66 ceil(B / 1448)) * 8 / rate.
B = 2 (n - 1) / n times the tensor's bytes leave each of n hosts, in frames of at most 1,448 bytes
plus 66 bytes of Ethernet, IP and TCP headers. `crossed` is the number of bytes that one call sends
from the busier host, divided by B. `packets` is the number of packets that it sends from there:
data, control and acknowledgements. Both come from the link's counters. A packet may be 64 KB long,
because the kernel splits it only if it must; `least` is the smallest number of such packets that
can carry B bytes. An idle job's row has CPU time and packets per second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import rows_of, two_hosts

HOSTS = 2
PEERS = ("farandole", "mpi", "gloo")
KINDS = ("blocking", "gradients", "idle")
JOB = Path(__file__).with_name("hosts_job.py")
SIZES = (4, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
MOST_SECONDS = 6.0  # limit for one peer in one case
PACKET = 45 * 1448  # bytes that the largest packet carries
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass
class HostsRow:
    """One peer in one case: seconds per call, bytes and packets that left the busier host."""

    ranks: str
    rate: str
    by: str
    what: str
    who: str
    nbytes: int
    median: float
    minimum: float
    calls: int
    wrong: int
    crossed: float
    packets: float

    @property
    def least(self) -> float:
        """Bytes that must leave each host."""
        return 2 * (HOSTS - 1) / HOSTS * self.nbytes

    @property
    def least_packets(self) -> int:
        """Smallest number of packets for these bytes."""
        return math.ceil(self.least / PACKET)

    @property
    def wire(self) -> float:
        """Seconds that the link needs for these bytes; 0 if its rate is not limited."""
        if self.rate == "none":
            return 0.0
        framed = self.least + 66 * math.ceil(self.least / 1448)
        return framed * 8 / bits_per_second(self.rate)


def bits_per_second(rate: str) -> float:
    """Converts a rate as tc writes it."""
    unit = next(unit for unit in _BITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * _BITS[unit]


def rows_of_job(
    ranks: int, rate: str, wire: str, arguments: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Runs hosts_job.py on two new hosts, and yields each row when it comes."""
    with two_hosts(rate, ranks) as hosts:
        argv = [str(JOB), "--rate", rate, *arguments]
        for row in rows_of(argv, HOSTS * ranks, hosts, FARANDOLE_WIRE=wire):
            yield {"by": wire, **row}


HEAD = (
    f"{'hosts':7}{'link':7}{'by':5}{'case':15}{'peer':11}{'median ms':>11}{'min ms':>11}"
    f"{'/wire':>7}{'/mpi':>7}{'/gloo':>7}{'crossed':>9}{'packets':>9}{'least':>7}{'wrong':>6}"
)


def text_of(row: HostsRow, peers: dict[str, HostsRow]) -> str:
    def ratio(name: str) -> str:
        other = peers.get(name)
        return f"{row.median / other.median:.2f}" if other else ""

    wire = f"{row.median / row.wire:.2f}" if row.wire else ""
    return (
        f"{row.ranks:7}{row.rate:7}{row.by:5}{row.what:15}{row.who:11}{1e3 * row.median:11.3f}"
        f"{1e3 * row.minimum:11.3f}{wire:>7}{ratio('mpi'):>7}{ratio('gloo'):>7}"
        f"{row.crossed / row.least:9.3f}{row.packets:9.0f}{row.least_packets:7}"
        f"{row.wrong:6}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="per host")
    add("--rates", nargs="+", default=["1gbit", "none"], help="link rates for tc, or `none`")
    add("--wires", nargs="+", default=["mpi", "tcp"], help="FARANDOLE_WIRE of each job")
    add("--rounds", type=int, default=1, help="number of jobs for each wire")
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    add("--peers", nargs="+", choices=PEERS, default=PEERS)
    add("--only", nargs="+", choices=KINDS, default=KINDS)
    add("--seconds", type=float, default=MOST_SECONDS, help="limit for a peer in a case")
    add("--turns", type=int, default=5, help="number of turns with gradients")
    add("--json", type=Path, metavar="FILE")
    return start(parser.parse_args())


def start(options: argparse.Namespace) -> int:
    """Runs all combinations and prints the table. Returns 1 if a result was wrong."""
    from rich.console import Console
    from rich.progress import Progress

    arguments = ["--sizes", *map(str, options.sizes), "--only", *options.only]
    arguments += ["--peers", *options.peers]
    arguments += ["--seconds", str(options.seconds), "--turns", str(options.turns)]
    combinations = [
        (n, rate, wire)
        for n in options.ranks
        for rate in options.rates
        for _ in range(options.rounds)
        for wire in options.wires
    ]
    peers = len(options.peers)
    each = peers * len(options.sizes) * ("blocking" in options.only)
    each += peers * ("gradients" in options.only) + ("idle" in options.only)
    rows: list[dict[str, Any]] = []
    console = Console(width=140, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rows", total=each * len(combinations))
        console.print(HEAD)
        for ranks, rate, wire in combinations:
            case: dict[str, HostsRow] = {}
            for values in rows_of_job(ranks, rate, wire, arguments):
                rows.append(values)
                progress.advance(task)
                if values["what"] == "idle":
                    console.print(
                        f"{values['ranks']:7}{rate:7}{values['by']:5}idle: "
                        f"{1e3 * values['ours']:.2f} ms of CPU per second in a rank's threads of "
                        f"farandole, {1e3 * values['others']:.2f} in all others; "
                        f"{values['packets']:.1f} packets per second from a host"
                    )
                    continue
                row = HostsRow(**values)
                case[row.who] = row
                if len(case) == peers:
                    for each_row in case.values():
                        console.print(text_of(each_row, case))
                    case = {}
    if options.json is not None:
        tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        found = {"kernel": os.uname().release, "cores": os.cpu_count(), "tcp": tcp}
        options.json.write_text(json.dumps({"settings": found, "rows": rows}, indent=1))
    return int(any(values.get("wrong") for values in rows))


if __name__ == "__main__":
    sys.exit(main())
