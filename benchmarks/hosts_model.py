# SPDX-License-Identifier: Apache-2.0
"""Models how allreduce across hosts scales: farandole's schedule and others, with fixed constants.

    python benchmarks/hosts_model.py [--plot docs/hosts-model.png] [--json FILE]

It measures nothing. A host has one full-duplex link of a given rate. A message arrives LATENCY
after its last byte has left, and takes OVERHEAD of its rank's time at either end. farandole's
schedule is simulated block by block with the cuts of hierarchical_schedule.cc (csrc/data), so that
pipelining, the number of slots and uneven loads count. The others are formulas of the alpha-beta
model (R. Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005):

ring: 2 (p - 1) steps of bytes / p over all p ranks; one link of each host is crossed;
tree: up and down a binomial tree of all ranks, the whole tensor at every step;
halving: reduce-scatter in the host, recursive halving and doubling between hosts, all-gather.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_plot import label_ends

Array = np.ndarray[Any, np.dtype[Any]]

RANKS = 8  # per host
LATENCY = 20e-6  # seconds, through a switch, by TCP
OVERHEAD = 2e-6  # seconds of a rank's core per message, at either end
IN_HOST = 10e9  # bytes per second that a host stages and reduces, or copies out
HOSTS = (8, 16, 32, 64, 128, 256, 512, 1024)
RATES = (10e9, 100e9)  # bits per second
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 100 << 20)


@dataclass(frozen=True)
class Sizes:
    """Sizes of HierarchicalSchedule and of its backend's slots, as farandole sets them."""

    block: int
    slots: int
    least_chunk: int = 512
    most_chunk: int = 48 << 10
    direct: int = 16 << 10

    @classmethod
    def of(cls, hosts: int) -> Sizes:
        """A block has 4 KB for each stripe and host, at least 256 KB, at most 2 MB."""
        block = max(256 << 10, min(RANKS * hosts * 4096, 2 << 20))
        return cls(block, max(4, (4 << 20) // block))


def bound(nbytes: int, hosts: int, rate: float) -> float:
    """Lower bound for all schedules: the bytes that each link must carry, and one message."""
    return max(2 * (hosts - 1) / hosts * nbytes * 8 / rate, LATENCY + OVERHEAD)


def ring(nbytes: int, hosts: int, rate: float) -> float:
    ranks = RANKS * hosts
    return 2 * (ranks - 1) * (LATENCY + OVERHEAD + nbytes / ranks * 8 / rate)


def tree(nbytes: int, hosts: int, rate: float) -> float:
    """Seconds of a flat tree; steps inside a host are free."""
    return 2 * math.ceil(math.log2(hosts)) * (LATENCY + OVERHEAD + nbytes * 8 / rate)


def halving(nbytes: int, hosts: int, rate: float) -> float:
    """Seconds of the faster one: halving and doubling, or doubling with the whole tensor."""
    steps = math.ceil(math.log2(hosts))
    inside = 2 * nbytes / IN_HOST
    whole = steps * (LATENCY + OVERHEAD + nbytes * 8 / rate)
    halves = 2 * steps * (LATENCY + OVERHEAD) + 2 * (hosts - 1) / hosts * nbytes * 8 / rate
    return inside + min(whole, halves)


class FarandoleModel:
    """HierarchicalBackend's schedule: hosts send a chunk to its home host, which sends the
    result."""

    def __init__(self, hosts: int, rate: float, sizes: Sizes) -> None:
        self.hosts, self.rate, self.sizes = hosts, rate, sizes
        self._out = np.zeros(hosts)  # when a host's link is free, in either direction
        self._in = np.zeros(hosts)

    def seconds(self, nbytes: int) -> float:
        """Seconds of one allreduce on idle links."""
        ends: list[float] = []
        staged = 0.0
        for number, begin in enumerate(range(0, nbytes, self.sizes.block)):
            block = min(self.sizes.block, nbytes - begin)
            slot = ends[-self.sizes.slots] if len(ends) >= self.sizes.slots else 0.0
            staged = max(staged, slot) + block / IN_HOST
            ends.append(self._block(number, block, staged) + block / IN_HOST)
        return max(ends)

    def _block(self, number: int, block: int, ready: float) -> float:
        """Time at which all hosts have the block's result."""
        others = self.hosts - 1
        if block // RANKS * others <= self.sizes.direct:
            sent = np.full(self.hosts, float(block * others))
            messages = np.full(self.hosts, others)
            done = self._hop(np.full(self.hosts, ready), sent, sent, messages, messages)
            return float(done.max())
        even = -(-block // (RANKS * self.hosts * 64)) * 64
        unit = min(max(even, self.sizes.least_chunk), self.sizes.most_chunk)
        chunks = -(-block // unit)
        stripes = np.arange(chunks) % RANKS
        homes = (np.arange(chunks) // RANKS + number * -(-chunks // RANKS)) % self.hosts
        at_home = np.bincount(homes, minlength=self.hosts)  # chunks
        held = at_home * unit
        # The messages of the busiest stripe's worker, whose time counts.
        stripe = np.bincount(stripes, minlength=RANKS).max()
        own = np.zeros((self.hosts, RANKS), int)
        np.add.at(own, (homes, stripes), 1)
        most_own = own.max(axis=1)
        everything = np.full(self.hosts, float(chunks * unit))
        combined = self._hop(
            np.full(self.hosts, ready),
            everything - held,
            held * others,
            np.full(self.hosts, stripe),
            most_own * others,
        )
        done = self._hop(
            combined, held * others, everything - held, most_own * others, stripe - most_own
        )
        return float(done.max())

    def _hop(
        self, ready: Array, sent: Array, received: Array, sends: Array, receives: Array
    ) -> Array:
        """Times at which each host has received its data. A port is busy with bytes, or with the
        messages of the busiest rank."""
        wire = 8 / self.rate
        self._out = np.maximum(self._out, ready) + np.maximum(sent * wire, sends * OVERHEAD)
        first = ready.min() + LATENCY
        self._in = np.maximum(self._in, first) + np.maximum(received * wire, receives * OVERHEAD)
        done: Array = np.maximum(self._in, self._out.max() + LATENCY)
        return done


def ours(nbytes: int, hosts: int, rate: float) -> float:
    """Seconds of farandole with a job's default sizes."""
    return FarandoleModel(hosts, rate, Sizes.of(hosts)).seconds(nbytes)


SCHEDULES: dict[str, Callable[[int, int, float], float]] = {
    "farandole": ours, "halving": halving, "ring": ring, "tree": tree,
}  # fmt: skip


def size_text(nbytes: int) -> str:
    """`65536` -> `64 KB`."""
    return f"{nbytes >> 20} MB" if nbytes >> 20 else f"{nbytes >> 10} KB"


def plot(path: Path) -> None:
    """Plots time over the bound, for a small and a large tensor: a panel for each rate and size."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, layout="constrained")
    for row, rate in zip(rows, RATES, strict=True):
        for axis, nbytes in zip(row, (64 << 10, 100 << 20), strict=True):
            ends = []
            for (name, schedule), mark in zip(SCHEDULES.items(), "os^v", strict=True):
                ratios = [schedule(nbytes, n, rate) / bound(nbytes, n, rate) for n in HOSTS]
                (line,) = axis.plot(HOSTS, ratios, marker=mark, markersize=4)
                ends.append((HOSTS[-1], ratios[-1], name, line.get_color()))
            axis.set(xscale="log", yscale="log")
            axis.set_title(f"{size_text(nbytes)}, {rate / 1e9:.0f} Gbit/s")
            axis.set_xticks(HOSTS, [f"{n:,}" for n in HOSTS])
            axis.minorticks_off()
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.3)
            label_ends(axis, ends)
        row[0].set_ylabel("time / lower bound (model)")
    for axis in rows[-1]:
        axis.set_xlabel("hosts of 8 ranks")
    figure.savefig(path, dpi=160)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    print(f"# {RANKS} ranks a host, latency {1e6 * LATENCY:g} us, {1e6 * OVERHEAD:g} us a message;")
    print("# milliseconds, and time / lower bound")
    print(f"{'link':>9} {'size':>7} {'hosts':>6}" + "".join(f"{n:>21}" for n in SCHEDULES))
    for rate in RATES:
        for nbytes in SIZES:
            for hosts in HOSTS:
                least = bound(nbytes, hosts, rate)
                took = {name: f(nbytes, hosts, rate) for name, f in SCHEDULES.items()}
                rows.append({"rate": rate, "bytes": nbytes, "hosts": hosts, "bound": least, **took})
                cells = "".join(f"{1e3 * t:13.3f} {t / least:7.2f}" for t in took.values())
                print(f"{rate / 1e9:5.0f} Gb/s {size_text(nbytes):>7} {hosts:6}{cells}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot is not None:
        plot(options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
