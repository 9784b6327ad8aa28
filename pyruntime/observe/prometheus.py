# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, if FARANDOLE_METRICS_PORT is set: each rank serves its own port, on its
own thread. init() and shutdown() call this."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from itertools import accumulate

from farandole._library import lib, text
from farandole.config import setting
from farandole.errors import warn
from farandole.observe.flight import own_page
from farandole.observe.metrics import metrics
from farandole.observe.scrapes import ScrapeServer
from farandole.topology import local_rank, local_size, rank

_TRIES = 20  # ports that a rank tries
_LAST_PORT = 65535
_server: ScrapeServer | None = None


# By our name: what is measured. Units follow from the name's end.
_MEANINGS = {
    "tensors_submitted": "Calls that this rank has submitted",
    "tensors_done": "Calls whose result is there",
    "tensors_failed": "Calls that have failed",
    "bytes_done": "Bytes of the tensors that are done",
    "buckets_done": "Buckets that have been moved",
    "mapped_bytes": "Bytes of this rank that others used in place: zero copy",
    "moving_ns": "Seconds in which a bucket was moved",
    "late_times": "Times that this rank was the last to submit a call",
    "late_ns": "Seconds by which it then came after the first rank",
    "sleeps": "Times that a thread of the core has slept until it was woken",
    "rescued_wakeups": "Lost wake-ups, found by a timer; 0 without bugs",
    "negotiation_ns": "Seconds from a submission until all agree",
    "wait_ns": "Seconds that a caller was blocked in one wait",
    "bucket_bytes": "Bytes of one bucket",
    "bandwidth_MBps": "Bytes of a bucket by the seconds from its launch to its end",
}
_UNITS = {"_ns": ("_seconds", 1e-9), "_MBps": ("_bytes_per_second", 1e6)}  # Prometheus's, factor


def _named(name: str) -> tuple[str, float]:
    """The name there, and what values are multiplied by."""
    for ours, (theirs, factor) in _UNITS.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs, factor
    return name, 1.0


def exposition() -> str:
    """This rank's metrics in Prometheus's text format: counters, histograms, gauges."""
    found, own = metrics(), f'rank="{rank()}"'
    lines: list[str] = []

    def add(kind: str, name: str, meaning: str, rows: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP farandole_{name} {meaning}")
        lines.append(f"# TYPE farandole_{name} {kind}")
        lines.extend(f"farandole_{name}{end}{{{of}}} {float(value)}" for end, of, value in rows)

    for name, value in found.items():
        shown, factor = _named(name)
        add("counter", f"{shown}_total", _MEANINGS[name], [("", own, value * factor)])
    for name, one in found.histograms.items():
        shown, factor = _named(name)
        bounds = [*(repr((1 << i) * factor) for i in range(len(one.counts))), "+Inf"]
        seen = zip(bounds, [*accumulate(one.counts), one.count], strict=True)
        rows: list[tuple[str, str, float]] = []
        rows += [("_bucket", f'le="{bound}",{own}', count) for bound, count in seen]
        rows += [("_count", own, one.count), ("_sum", own, one.sum * factor)]
        add("histogram", shown, _MEANINGS[name], rows)
    add("gauge", "stalled_calls", _STALLED, [("", own, _stalled())])
    version, core = text(lib.farandole_version()), text(lib.farandole_build_id())
    build = f'core="{core}",{own},version="{version}"'
    add("gauge", "build_info", "Always 1: the build is in the labels", [("", build, 1)])
    return "\n".join([*lines, ""])


_STALLED = "Calls that have waited for other ranks for longer than FARANDOLE_STALL_WARN seconds"


def _stalled() -> int:
    """This rank's calls of that kind; 0 if stalls are not to be reported."""
    patience = float(setting("FARANDOLE_STALL_WARN"))
    page = own_page(1)
    if page["state"] != "running":  # after a failure nobody ends its calls in the page
        return 0
    waited = (page["now_ns"] - call["t"] for call in page["open"] if not call["position"])
    return sum(patience > 0 and ns > patience * 1e9 for ns in waited)


def serve() -> None:
    """Serves metrics until stop() if FARANDOLE_METRICS_PORT is set. init() calls it.

    At that port + local rank; if it is taken, by another job perhaps, at the next free one of its
    neighbours. Metrics are never a reason not to train: what prevents them is a warning.
    """
    global _server
    first = int(setting("FARANDOLE_METRICS_PORT"))
    if first == 0:
        return
    address, wanted = setting("FARANDOLE_METRICS_ADDRESS"), first + local_rank()
    refused: Exception | None = None
    # Every rank looks in a row of its own, so that two ranks never want the same port.
    for port in range(wanted, min(wanted + _TRIES * local_size(), _LAST_PORT + 1), local_size()):
        try:
            _server = ScrapeServer(address, port, exposition)
        except (OSError, OverflowError) as reason:
            refused = refused or reason
            if getattr(reason, "errno", 0) != errno.EADDRINUSE:
                break
        else:
            if port != wanted:
                _warn(f"port {wanted} is taken: rank {rank()} answers on {address}:{port}")
            return
    _warn(
        f"no metrics of rank {rank()} on {address}:{wanted}: {refused or 'there is no such port'}"
    )


def _warn(what: str) -> None:
    warn(f"FARANDOLE_METRICS_PORT: {what}", RuntimeWarning)


def stop() -> None:
    """Stops serving. Idempotent."""
    global _server
    running, _server = _server, None
    if running is not None:
        running.close()


def _after_fork() -> None:
    """A forked worker has no server's thread; its copy of the port is closed already."""
    global _server
    _server = None


os.register_at_fork(after_in_child=_after_fork)
