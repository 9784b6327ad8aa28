# SPDX-License-Identifier: Apache-2.0
"""The search of `farandole tune`: candidates take turns, and the slower half drops out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

import numpy as np

import farandole
from farandole.errors import counted
from farandole.output import Tell
from farandole.tools.bench_timing import everywhere

Setting = tuple[str, str]  # a variable and a value to try
KNOBS = {  # variables and all values to try
    "FARANDOLE_BLOCK_BYTES": ("128K", "256K", "512K", "1M", "2M"),
    "FARANDOLE_STAGING_SLOTS": ("2", "4", "8"),
    "FARANDOLE_FUSION_THRESHOLD": ("4M", "16M", "32M", "64M", "128M"),
}
_FEWEST = 3  # turns of a candidate for a finding
_MOST = 25  # turns of one round
# Sizes that are timed, in bytes: one large call, one of a megabyte, and many gradients at once.
_LARGE, _MIDDLE, _GRADIENT = 16 << 20, 1 << 20, 256 << 10
_GRADIENTS = 160  # tensors


@dataclass
class Candidate:
    """Settings, and the time of each turn, as a multiple of the defaults' time in that turn."""

    settings: tuple[Setting, ...]
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Its time divided by that of the defaults: 0.9 takes 10 % less."""
        return float(np.median(self.ratios)) if self.ratios else 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings)


@dataclass(frozen=True)
class Found:
    """The best settings (none: the defaults), and the share of the time that they save."""

    settings: tuple[Setting, ...]
    gain: float
    sure: bool = True  # there was time to try all and to look again at the best


def search(seconds: float, out: Tell) -> Found:
    """Block size and staging depth together, then the fusion threshold, then the best against the
    defaults, in `seconds` at most, but for one measurement. Collective; farandole must not be
    running. All ranks get the same result."""
    clock = _Clock()
    blocks, slots, fusion = ([(name, value) for value in values] for name, values in KNOBS.items())
    stages: list[list[tuple[Setting, ...]]] = [
        [*itertools.product(blocks, slots)],
        [(setting,) for setting in fusion],
    ]
    base: tuple[Setting, ...] = ()
    tried = True
    for stage, share in zip(stages, (0.5, 0.75), strict=True):
        candidates = [Candidate((*base, *settings)) for settings in stage]
        best = _halving(candidates, clock, seconds * share, out)
        base = best.settings if best.ratio < 1 else base
        tried = tried and all(candidate.ratios for candidate in candidates)
    if not base:
        return Found((), 0.0, sure=tried)
    final = Candidate(base)
    _turns([final], clock, seconds, _MOST)
    turns = counted(len(final.ratios), "turn")
    out(f"once more, against the defaults: {final}: {final.ratio:.3f}, {turns}")
    return Found(base, 1 - final.ratio, sure=len(final.ratios) >= _FEWEST)


class _Clock:
    """Seconds since the search started, by rank 0's clock and thus alike on all ranks."""

    def __init__(self) -> None:
        self._began = monotonic()
        self.now = 0.0

    def look(self) -> None:
        """Collective; while farandole runs."""
        self.now = float(farandole.broadcast_object(monotonic() - self._began, 0))


def _halving(candidates: Sequence[Candidate], clock: _Clock, until: float, out: Tell) -> Candidate:
    """Runs rounds of turns and keeps the better half after each. Prints what was tried."""
    left = list(candidates)
    while True:
        to_come = sum(len(left) >> i for i in range(len(left).bit_length()))  # in all rounds
        _turns(left, clock, clock.now + (until - clock.now) * len(left) / to_come, _MOST)
        left.sort(key=lambda c: c.ratio)
        left = left[: max(1, len(left) // 2)]
        if len(left) == 1:
            break
    out("time / defaults'  turns  settings")
    for candidate in sorted(candidates, key=lambda c: (-len(c.ratios), c.ratio)):
        out(f"{candidate.ratio:16.3f}  {len(candidate.ratios):5}  {candidate}")
    return left[0]


def _turns(candidates: Sequence[Candidate], clock: _Clock, until: float, most: int) -> None:
    """Times each candidate and the defaults in turns, while there is time; collective."""
    for turn in range(most):
        for candidate in candidates:
            if clock.now >= until:
                return
            order = [(), candidate.settings]
            times = {s: _measure(s, clock) for s in order[:: 1 if turn % 2 else -1]}
            ratios = times[candidate.settings] / times[()]
            candidate.ratios.append(float(np.exp(np.mean(np.log(ratios)))))


# ---- one measurement


@contextmanager
def _in_force(settings: Sequence[Setting]) -> Iterator[None]:
    """A context: a job with these settings and defaults for the others that are searched."""
    names = {*KNOBS, "FARANDOLE_TUNING", "HOROVOD_FUSION_THRESHOLD"}
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["FARANDOLE_TUNING"] = "none"
    os.environ.update(settings)
    try:
        farandole.init()
        yield
    finally:
        farandole.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _measure(settings: Sequence[Setting], clock: _Clock) -> Any:
    """Seconds of each workload: the median of a few calls, the slowest rank's. Collective."""
    with _in_force(settings):
        rank, size = farandole.rank(), farandole.size()
        large, middle = (np.full(n // 4, rank + 1, np.float32) for n in (_LARGE, _MIDDLE))
        small = [np.full(_GRADIENT // 4, rank + 1, np.float32) for _ in range(_GRADIENTS)]
        names = [f"tune.{i}" for i in range(_GRADIENTS)]

        def one(x: Any) -> None:
            farandole.allreduce_(x, op=farandole.Average)

        def many() -> None:
            for handle in [
                farandole.allreduce_async_(x, op=farandole.Average, name=name)
                for x, name in zip(small, names, strict=True)
            ]:
                handle.wait()

        found = [_median(lambda: one(large), 5), _median(lambda: one(middle), 15), _median(many, 5)]
        if any(np.any(x != (size + 1) / 2) for x in (large, middle, *small)):
            raise farandole.FarandoleError(f"wrong results with {settings}: please report this")
        clock.look()
        return everywhere(found).max(axis=0)


def _median(call: Callable[[], None], times: int) -> float:
    """The median seconds of a call; a first call synchronizes the ranks."""
    call()
    seconds = []
    for _ in range(times):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return float(np.median(seconds))
