# SPDX-License-Identifier: Apache-2.0
"""Compares farandole with gloo, MPI and the memory's limit on the CPUs of one host.

    mpirun -np 2 --bind-to none python benchmarks/collectives.py [--json FILE] [--quick]

Contestants alternate. All cases are in place, float32: blocking allreduces of 4 B to 256 MB; 1,000
asynchronous ones of 1 KB; the 161 gradients of ResNet-50, as named asynchronous calls, and with
DistributedOptimizer and DistributedDataParallel (a backward pass minus the same pass without
communication). Messages go back and forth between ranks 0 and 1, 2 and 3, ...; a row has the time
of one way. Every result is checked. The limit needs --limit, or the program memory_limit in
build/release/benchmarks, which `make bench` builds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import resnet50
import torch
import torch.distributed as dist
from backward import backward
from mpi4py import MPI
from turns import Contestant, Row, finish, head, show, take_turns

import farandole
import farandole.torch as hvd
from farandole.tools.bench_cases import Case, Operand
from farandole.tools.bench_peers import FarandolePeer, GlooPeer, MpiPeer
from farandole.tools.bench_report import size_text
from farandole.tools.bench_timing import calls_for, measure

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
QUICK = (4, 64 << 10, 1 << 20, 16 << 20)
LIMIT = Path(__file__).resolve().parents[1] / "build" / "release" / "benchmarks" / "memory_limit"


class ArenaPeer(FarandolePeer):
    """farandole's calls on arrays that all ranks map."""

    name = "farandole, zero copy"

    def prepare(self, x: Operand) -> Any:
        """Makes the operand's array with empty(); returns the function to time."""
        x.array = farandole.empty(x.array.shape, x.array.dtype)
        return super().prepare(x)


def blocking(sizes: Sequence[int], peers: list[Any], limit: Path) -> list[Row]:
    """Measures blocking calls of each size; measures the limit before and after each size."""
    rows = []
    for nbytes in sizes:
        what = f"blocking {size_text(nbytes)}"
        case = Case.of("allreduce", "float32", nbytes, farandole.rank(), farandole.size())
        before = _limit(limit, nbytes)
        results = measure(case, peers, calls_for(nbytes))
        found = [Row(what, r.peer, r.seconds, r.wrong) for r in results]
        medians = [t for t in (before, _limit(limit, nbytes)) if t is not None]
        if medians:
            found.append(Row(what, "limit", np.array(sorted(medians))))
        show(found, against=("gloo", "mpi", "limit"))
        rows += found
    return rows


def _limit(program: Path, nbytes: int) -> float | None:
    """Median seconds of the program memory_limit, while the other ranks sleep."""
    seconds = None
    if farandole.rank() == 0 and program.exists():
        calls = max(3, min(200, calls_for(nbytes) // 2))
        arguments = [str(program), str(farandole.size()), str(nbytes), str(calls)]
        seconds = 1e-6 * float(subprocess.check_output(arguments, text=True).split()[1])
    farandole.barrier()
    return seconds


# ---- many tensors at once


def contestants(what: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, Contestant]:
    data, ranks = resnet50.Data(shapes, farandole.rank()), range(farandole.size())
    tensors = [torch.zeros(shape) for shape in shapes]
    arrays = [x.numpy() for x in tensors]
    names = [f"{what}.{i}" for i in range(len(shapes))]

    def contestant(submit: Callable[[], list[Any]], wait: Callable[[list[Any]], object]) -> Any:
        def run() -> float:
            start = perf_counter()
            wait(submit())
            return perf_counter() - start

        return Contestant(lambda: data.fill(tensors), run, lambda: data.wrong(tensors, ranks))

    def each(handles: list[Any]) -> None:
        for handle in handles:
            handle.wait()

    def one_by_one(arrays: list[Any]) -> None:
        for array in arrays:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

    def named() -> list[Any]:
        pairs = zip(tensors, names, strict=True)
        return [hvd.allreduce_async_(x, op=hvd.Sum, name=name) for x, name in pairs]

    return {
        "farandole": contestant(named, each),
        "gloo": contestant(lambda: [dist.all_reduce(x, async_op=True) for x in tensors], each),
        "mpi": contestant(
            lambda: [MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, a, MPI.SUM) for a in arrays],
            MPI.Request.Waitall,
        ),
        "mpi, blocking": contestant(lambda: arrays, one_by_one),
    }


def asynchronous(what: str, shapes: Sequence[tuple[int, ...]], turns: int) -> list[Row]:
    rows = take_turns(what, contestants(what, shapes), turns)
    show(rows)
    return rows


# ---- messages


def messages(nbytes: int, turns: int, pairs: Sequence[farandole.ProcessSet]) -> list[Row]:
    """Sends a message to the partner and back, compared with broadcasts in the same pair."""
    rank = farandole.rank()
    pair = pairs[rank // 2]
    partner, rounds = rank ^ 1, max(2, calls_for(nbytes) // 10)
    x, y = np.full(nbytes // 4, rank, np.float32), np.zeros(nbytes // 4, np.float32)
    mine, its = torch.from_numpy(x), torch.from_numpy(y)
    world = MPI.COMM_WORLD

    def contestant(send: Callable[[], object], receive: Callable[[], object]) -> Contestant:
        first, second = (receive, send) if rank % 2 else (send, receive)

        def run() -> float:
            start = perf_counter()
            for _ in range(rounds):
                first()
                second()
            return (perf_counter() - start) / (2 * rounds)

        return Contestant(lambda: y.fill(-1), run, lambda: int((y != partner).sum()))

    rows = take_turns(
        f"message {size_text(nbytes)}",
        {
            "farandole": contestant(
                lambda: farandole.send(x, partner), lambda: farandole.recv(y, partner)
            ),
            "broadcast": contestant(
                lambda: farandole.broadcast_(x, rank, process_set=pair),
                lambda: farandole.broadcast_(y, partner, process_set=pair),
            ),
            "gloo": contestant(lambda: dist.send(mine, partner), lambda: dist.recv(its, partner)),
            "mpi": contestant(lambda: world.Send(x, partner), lambda: world.Recv(y, partner)),
        },
        turns,
    )
    show(rows, against=("broadcast", "gloo", "mpi"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--limit", type=Path, default=LIMIT, metavar="PROGRAM")
    parser.add_argument("--quick", action="store_true", help="fewer turns, up to 16 MB")
    parser.add_argument(
        "--mib", type=lambda n: int(n) << 20, nargs="*", help="sizes of blocking calls"
    )
    parser.add_argument("--only", choices=("blocking", "small", "resnet50", "messages"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    farandole.init()
    gloo = GlooPeer()
    turns = 5 if options.quick else 15
    head()
    rows: list[Row] = []
    if options.only in (None, "blocking"):
        sizes = options.mib or (QUICK if options.quick else SIZES)
        rows += blocking(sizes, [FarandolePeer(), ArenaPeer(), gloo, MpiPeer()], options.limit)
    if options.only in (None, "small"):
        rows += asynchronous("1,000 async 1K", [(256,)] * 1000, turns)
    if options.only in (None, "resnet50"):
        rows += asynchronous("161 gradients async", resnet50.shapes(), turns)
        rows += backward("161 gradients in backward", resnet50.shapes(), turns)
    if options.only in (None, "messages") and farandole.size() % 2 == 0:
        pairs: list[farandole.ProcessSet] = [farandole.global_process_set]
        if farandole.size() > 2:
            pairs = [farandole.add_process_set([r, r + 1]) for r in range(0, farandole.size(), 2)]
        for nbytes in options.mib or QUICK:
            rows += messages(nbytes, turns, pairs)
    code = finish(rows, options.json)
    gloo.close()
    farandole.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
