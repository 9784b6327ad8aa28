# SPDX-License-Identifier: Apache-2.0
"""The search of `farandole tune`.

It chooses the settings one after another. For each setting, it times all values in turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

import farandole
from farandole.output import PrintLine
from farandole.tools.bench_timing import everywhere

Setting = tuple[str, str]  # a variable and its value
KNOBS = {  # the values to try for each variable
    "FARANDOLE_BLOCK_BYTES": ("128K", "256K", "512K", "1M", "2M"),
    "FARANDOLE_STAGING_SLOTS": ("2", "4", "8"),
    "FARANDOLE_FUSION_THRESHOLD": ("4M", "16M", "32M", "64M", "128M"),
}
# Sizes in bytes of the tensors in the timed calls: one large call, one medium call, and many
# gradients at once.
_LARGE, _MIDDLE, _GRADIENT = 16 << 20, 1 << 20, 256 << 10
_GRADIENTS = 160  # number of gradients


@dataclass(frozen=True)
class SearchResult:
    """The best settings, and the share of time that they save. No settings means the defaults."""

    settings: tuple[Setting, ...]
    gain: float


def search(turns: int, out: PrintLine) -> SearchResult:
    """Chooses the settings one after another, then compares the choice with the defaults once more.

    This is a collective. Call it before init(). All ranks return the same result.
    """
    best: tuple[Setting, ...] = ()
    for name, values in KNOBS.items():
        trials = [(*best, (name, value)) for value in values]
        ratios = _ratios(best, trials, turns)
        out(f"{name}: time of each value, divided by that of {_words(best)}")
        for trial, ratio in zip(trials, ratios, strict=True):
            out(f"  {ratio:.3f}  {name}={trial[-1][1]}")
        if min(ratios) < 1:
            best = trials[ratios.index(min(ratios))]
    if not best:
        return SearchResult((), 0.0)
    (ratio,) = _ratios((), [best], 2 * turns)
    out(f"once more, against the defaults: {ratio:.3f}  {_words(best)}")
    return SearchResult(best, 1 - ratio)


def _words(settings: Sequence[Setting]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings) or "the defaults"


def _ratios(
    base: tuple[Setting, ...], trials: Sequence[tuple[Setting, ...]], turns: int
) -> list[float]:
    """Returns the trials' times, divided by the time of `base`, as medians over the turns.

    This is a collective. Each turn measures all settings. Every second turn does so in reverse
    order.
    """
    found: list[list[float]] = [[] for _ in trials]
    for turn in range(turns):
        order = [base, *trials][:: 1 if turn % 2 else -1]
        times = {settings: _measure(settings) for settings in order}
        for ratios, trial in zip(found, trials, strict=True):
            ratios.append(float(np.exp(np.mean(np.log(times[trial] / times[base])))))
    return [float(np.median(ratios)) for ratios in found]


# ---- one measurement


@contextmanager
def _in_force(settings: Sequence[Setting]) -> Iterator[None]:
    """Runs a job with these settings, and with defaults for the other variables in KNOBS."""
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


def _measure(settings: Sequence[Setting]) -> Any:
    """Returns the median seconds of each workload on the slowest rank. This is a collective."""
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
        return everywhere(found).max(axis=0)


def _median(call: Callable[[], None], times: int) -> float:
    """Returns the median seconds of a call.

    A first call, which synchronizes the ranks, does not count.
    """
    call()
    seconds = []
    for _ in range(times):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return float(np.median(seconds))
