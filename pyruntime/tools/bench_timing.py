# SPDX-License-Identifier: Apache-2.0
"""Times `farandole bench`: peers take turns, and the first call of each turn is checked."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

import farandole
from farandole.tools.bench_cases import Array, Case, Operand
from farandole.tools.bench_peers import Peer, Run

Seconds = np.ndarray[Any, np.dtype[np.float64]]
_FEWEST, _MOST = 6, 1000
_BYTES = 5e8  # total over the calls of one case, within limits of the number of calls
_ROUNDS = 3  # least turns of each peer


@dataclass(frozen=True)
class Result:
    """One peer's result in one case. Times are seconds of a call, the mean over the ranks."""

    case: Case
    peer: str
    seconds: Seconds  # ascending
    wrong: int  # elements, all ranks and batches together

    @property
    def minimum(self) -> float:
        """The fastest call."""
        return float(self.seconds[0])

    @property
    def median(self) -> float:
        """The median call."""
        return float(np.median(self.seconds))

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return float(np.quantile(self.seconds, 0.99))

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: bytes per second, by the median."""
        return self.case.nbytes / self.median

    @property
    def busbw(self) -> float:
        """Bus bandwidth as in nccl-tests, comparable between numbers of ranks."""
        return self.algbw * self.case.collective.bus(self.case.size)


def begin() -> None:
    """Calls init() for a command. A setting that it refuses is not a defect: no traceback."""
    try:
        farandole.init()
    except ValueError as reason:
        raise farandole.FarandoleError(str(reason)) from reason


def is_refused(command: str, why: Callable[[], str]) -> bool:
    """Whether rank 0 can't write what the command shall write: `why`, by its file system, goes to
    stderr, and the job ends. Collective."""
    refused = farandole.broadcast_object(why() if farandole.rank() == 0 else "", 0)
    if refused:
        if farandole.rank() == 0:
            print(f"farandole {command}: {refused}", file=sys.stderr)
        farandole.shutdown()
    return bool(refused)


def calls_for(nbytes: int) -> int:
    """The number of calls of this size for a steady median in acceptable time."""
    return int(min(_MOST, max(_FEWEST, _BYTES / max(nbytes, 1))))


def measure(case: Case, peers: Sequence[Peer], calls: int) -> list[Result]:
    """At least `calls` timed calls of each peer that supports the case, in turn; collective."""
    peers = [peer for peer in peers if peer.supports(case)]
    operands = [Operand(case) for _ in peers]
    runs = [peer.prepare(x) for peer, x in zip(peers, operands, strict=True)]
    batch = 1 + -(-calls // _ROUNDS)
    times: list[list[float]] = [[] for _ in peers]
    wrong = [0] * len(peers)
    turn = 0
    while peers and len(times[-1]) < calls:
        for i in (*range(turn, len(peers)), *range(turn)):
            operands[i].fill()
            wrong[i] += operands[i].wrong(runs[i]())
            times[i] += timed(runs[i], batch)[0]  # sums in place grow, at last to infinity
        turn = (turn + 1) % len(peers)
    del runs
    return [
        Result(case, peer.name, np.sort(everywhere(t).mean(axis=0)), int(everywhere([w]).sum()))
        for peer, t, w in zip(peers, times, wrong, strict=True)
    ]


def timed(run: Run, calls: int, meet: Callable[[], None] = farandole.barrier) -> Any:
    """(seconds of each call but the first, the last output). The first synchronizes the ranks."""
    seconds = []
    gc.collect()
    gc.disable()
    meet()
    output: Array = run()
    for _ in range(calls - 1):
        start = perf_counter()
        output = run()
        seconds.append(perf_counter() - start)
    gc.enable()
    return seconds, output


def everywhere(values: Sequence[float]) -> Seconds:
    """All ranks' values, a row per rank; collective."""
    return np.asarray(farandole.allgather(np.array([values], np.float64)))
