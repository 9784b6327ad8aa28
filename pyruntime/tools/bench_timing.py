# SPDX-License-Identifier: Apache-2.0
"""Times the peers of `farandole bench` in turns, and checks the first call of each turn."""

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
_FEWEST, _MOST = 6, 1000  # limits for the number of calls
_BYTES = 5e8  # number of bytes that the calls of one case should move in all
_ROUNDS = 3  # smallest number of turns per peer


@dataclass(frozen=True)
class Measurement:
    """The result of one peer in one case. Each time is one call's time, averaged over the ranks."""

    case: Case
    peer: str
    seconds: Seconds  # ascending
    wrong: int  # number of wrong elements, on all ranks and in all turns

    @property
    def minimum(self) -> float:
        """Time of the fastest call, in seconds."""
        return float(self.seconds[0])

    @property
    def median(self) -> float:
        """Median time of a call, in seconds."""
        return float(np.median(self.seconds))

    @property
    def p99(self) -> float:
        """99th percentile of a call's time, in seconds."""
        return float(np.quantile(self.seconds, 0.99))

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: bytes / median seconds."""
        return self.case.nbytes / self.median

    @property
    def busbw(self) -> float:
        """Bus bandwidth as nccl-tests defines it. It is comparable between numbers of ranks."""
        return self.algbw * self.case.collective.bus(self.case.size)


def init_or_explain() -> None:
    """Calls init() for a command.

    If a setting is invalid, raises FarandoleError, which the command prints without a traceback.
    """
    try:
        farandole.init()
    except ValueError as reason:
        raise farandole.FarandoleError(str(reason)) from reason


def is_refused(command: str, why: Callable[[], str]) -> bool:
    """If `why()` returns a reason on rank 0, prints it, shuts down and returns True.

    This is a collective. `why` checks, before the work, whether rank 0 can write a file that the
    command will write.
    """
    refused = farandole.broadcast_object(why() if farandole.rank() == 0 else "", 0)
    if refused:
        if farandole.rank() == 0:
            print(f"farandole {command}: {refused}", file=sys.stderr)
        farandole.shutdown()
    return bool(refused)


def calls_for(nbytes: int) -> int:
    """Returns the number of calls of this size that gives a steady median in acceptable time."""
    return int(min(_MOST, max(_FEWEST, _BYTES / max(nbytes, 1))))


def measure(case: Case, peers: Sequence[Peer], calls: int) -> list[Measurement]:
    """Times at least `calls` calls of each peer that supports the case.

    This is a collective. Peers alternate. In each turn, every peer makes some of its calls.
    """
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
            times[i] += timed(runs[i], batch)[0]  # unchecked, as in-place sums grow to infinity
        turn = (turn + 1) % len(peers)
    del runs
    return [
        Measurement(
            case, peer.name, np.sort(everywhere(t).mean(axis=0)), int(everywhere([w]).sum())
        )
        for peer, t, w in zip(peers, times, wrong, strict=True)
    ]


def timed(run: Run, calls: int, meet: Callable[[], None] = farandole.barrier) -> Any:
    """Returns the seconds of each call, and the last output.

    A first call synchronizes the ranks and is not timed.
    """
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
    """Returns the values of all ranks, one row per rank. This is a collective."""
    return np.asarray(farandole.allgather(np.array([values], np.float64)))
