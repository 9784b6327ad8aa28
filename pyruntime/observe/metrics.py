# SPDX-License-Identifier: Apache-2.0
"""Public calls that return the core's metrics: counters, histograms and stragglers. They may be
called from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from farandole._library import check_count, ffi, lib, text
from farandole.observe import flight
from farandole.topology import is_initialized


@dataclass(frozen=True)
class Histogram:
    """A histogram in powers of two. `counts[i]` counts values below 2**i that no lower slot has."""

    count: int
    sum: int
    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        """The mean of all values, or 0 if there are none."""
        return self.sum / self.count if self.count else 0.0


@dataclass(frozen=True)
class Straggler:
    """Tells how often a rank was the last to be ready, and by how many seconds in total it was then
    later than the first rank."""

    times: int
    seconds: float


class Metrics(dict[str, int]):
    """This rank's counters since init(), by name.

    - tensors_submitted, tensors_done, tensors_failed; bytes_done; buckets_done.
    - moving_ns: time during which a bucket was under way.
    - late_times, late_ns: how often this rank was last, and by how much. Both are 0 if rank 0 is on
      another host.
    - sleeps; rescued_wakeups, which is 0 unless farandole has a bug.
    """

    # By name: negotiation_ns is the time from a tensor's submission to the decision. wait_ns is the
    # time for which callers are blocked. bucket_bytes is the size of a bucket. bandwidth_MBps is a
    # bucket's size divided by the time from launch to end (algbw).
    histograms: dict[str, Histogram]
    stragglers: dict[int, Straggler]  # by rank of this host; zeros if rank 0 is elsewhere


def _counters() -> dict[str, int]:
    count = check_count(lib.farandole_counters(ffi.NULL, 0))
    rows = ffi.new("farandole_counter[]", count)
    check_count(lib.farandole_counters(rows, count))
    return {text(row.name): int(row.value) for row in rows}


def metrics() -> Metrics:
    """Returns this rank's metrics. Before init(), these are only the counters of the process.

    Examples:
        >>> now = hvd.metrics()
        >>> now["bytes_done"] >= 0, now.histograms["wait_ns"].mean >= 0
        (True, True)
    """
    found = Metrics(_counters())
    found.histograms, found.stragglers = {}, {}
    if not is_initialized():
        return found
    page = flight.own_page()
    found.update(page["counters"])
    found["late_times"], found["late_ns"] = page["late"]["times"], page["late"]["ns"]
    found.histograms = {
        name: Histogram(one["count"], one["sum"], tuple(one["slots"]))
        for name, one in page["histograms"].items()
    }
    for other in flight.pages(-1, events=0):
        late = other["late"]
        found.stragglers[other["rank"]] = Straggler(late["times"], late["ns"] / 1e9)
    return found
