# SPDX-License-Identifier: Apache-2.0
"""The job of benchmarks/hosts.py, on every rank. Rank 0 prints a line of JSON for each result."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jobs
import resnet50
from collectives import contestants
from hosts import HOSTS, KINDS, PEERS
from idle import Usage, threads
from mpi4py import MPI
from turns import take_turns

import farandole
from farandole.tools.bench_cases import Case, Operand
from farandole.tools.bench_peers import PEERS as PEER_TYPES
from farandole.tools.bench_peers import GlooPeer
from farandole.tools.bench_report import size_text
from farandole.tools.bench_timing import calls_for, everywhere, measure, timed

IDLE_SECONDS = 5.0


def crossing(run: Callable[[], object], calls: int) -> tuple[float, float]:
    """Bytes and packets of one call that leave the busier host. Collective."""

    run()
    farandole.barrier()
    before = jobs.sent()
    for _ in range(calls):
        run()
    farandole.barrier()
    counted = everywhere([b - a for a, b in zip(before, jobs.sent(), strict=True)])
    nbytes, packets = counted.max(axis=0) / calls
    return float(nbytes), float(packets)


def tell(labels: dict[str, str], **values: Any) -> None:
    if farandole.rank() == 0:
        jobs.tell({**labels, **values})


def blocking(
    labels: dict[str, str], names: Sequence[str], sizes: Sequence[int], most_seconds: float
) -> None:
    peers = [PEER_TYPES[name]() for name in names]
    for nbytes in sizes:
        case = Case.of("allreduce", "float32", nbytes, farandole.rank(), farandole.size())
        trial = [timed(peer.prepare(Operand(case)), 3)[0][-1] for peer in peers]
        slowest = float(everywhere([max(trial)]).max())
        calls = max(6, min(calls_for(nbytes), 300, int(most_seconds / slowest)))
        for peer, result in zip(peers, measure(case, peers, calls), strict=True):
            crossed, packets = crossing(peer.prepare(Operand(case)), 5)
            tell(
                labels,
                what=size_text(nbytes),
                who=peer.name,
                nbytes=nbytes,
                median=result.median,
                minimum=result.minimum,
                calls=len(result.seconds),
                wrong=result.wrong,
                crossed=crossed,
                packets=packets,
            )
    for peer in peers:
        peer.close()


def gradients(labels: dict[str, str], names: Sequence[str], turns: int) -> None:
    gloo = GlooPeer() if "gloo" in names else None
    known = contestants("gradient", resnet50.shapes())
    known["mpi"] = known["mpi, blocking"]
    for row in take_turns("", {name: known[name] for name in names}, turns):
        crossed, packets = crossing(known[row.who].run, 1)
        tell(
            labels,
            what="161 gradients",
            who=row.who,
            nbytes=4 * resnet50.ELEMENTS,
            median=row.median,
            minimum=float(row.seconds.min()),
            calls=turns,
            wrong=row.wrong,
            crossed=crossed,
            packets=packets,
        )
    if gloo is not None:
        gloo.close()


def idle(labels: dict[str, str], before: set[str]) -> None:
    """CPU seconds per second of an idle rank. Threads that init() started are counted
    separately."""

    ours = threads() - before
    farandole.barrier()
    start, packets = [Usage.of(ours), Usage.of(before)], jobs.sent()[1]
    time.sleep(IDLE_SECONDS)
    now = [Usage.of(ours), Usage.of(before)]
    spent = [n.since(s).cpu_ns / 1e9 / IDLE_SECONDS for n, s in zip(now, start, strict=True)]
    most = everywhere(spent).max(axis=0).tolist()
    rest = (jobs.sent()[1] - packets) / IDLE_SECONDS
    tell(labels, what="idle", ours=most[0], others=most[1], packets=rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", required=True)
    parser.add_argument("--peers", nargs="+", choices=PEERS, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--only", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    options = parser.parse_args()
    before = threads() if MPI.Is_initialized() else set()
    farandole.init()
    labels = {"ranks": f"{HOSTS} x {farandole.local_size()}", "rate": options.rate}
    assert farandole.cross_size() == HOSTS
    if "idle" in options.only:
        idle(labels, before)
    if "blocking" in options.only:
        blocking(labels, options.peers, options.sizes, options.seconds)
    if "gradients" in options.only:
        gradients(labels, options.peers, options.turns)
    farandole.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
