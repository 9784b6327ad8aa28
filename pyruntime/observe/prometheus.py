# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, if FARANDOLE_METRICS_PORT is set: each rank serves its own port, on its
own thread. init() and shutdown() call this."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from farandole._library import lib, text
from farandole.config import setting
from farandole.observe.flight import own_page
from farandole.observe.metrics import Histogram, metrics
from farandole.observe.scrapes import ScrapeServer
from farandole.topology import local_rank, local_size, rank

if TYPE_CHECKING:
    from prometheus_client import Metric

_TRIES = 20  # ports that a rank tries
_LAST_PORT = 65535
_server: ScrapeServer | None = None


def _histogram(one: Histogram, factor: float) -> list[tuple[str, float]]:
    """Cumulative buckets; bounds in the metric's unit, the value times `factor`."""
    seen, found = 0, []
    for i, count in enumerate(one.counts):
        seen += count
        found.append((repr((1 << i) * factor), float(seen)))
    return [*found, ("+Inf", float(one.count))]


_NS, _MB = 1e-9, 1e6  # factors to Prometheus's units

# By our name: name and unit there, factor, what is measured.
_COUNTERS = {
    "tensors_submitted": ("tensors_submitted", 1.0, "Calls that this rank has submitted"),
    "tensors_done": ("tensors_done", 1.0, "Calls whose result is there"),
    "tensors_failed": ("tensors_failed", 1.0, "Calls that have failed"),
    "bytes_done": ("bytes_done", 1.0, "Bytes of the tensors that are done"),
    "buckets_done": ("buckets_done", 1.0, "Buckets that have been moved"),
    "mapped_bytes": (
        "mapped_bytes",
        1.0,
        "Bytes of this rank that others used in place: zero copy",
    ),
    "moving_ns": ("moving_seconds", _NS, "Seconds in which a bucket was moved"),
    "audits_done": ("audits_done", 1.0, "Blocks that FARANDOLE_AUDIT has reduced again"),
    "faults_found": ("faults_found", 1.0, "Messages and results that hardware has changed"),
    "late_times": ("late_times", 1.0, "Times that this rank was the last to submit a call"),
    "late_ns": ("late_seconds", _NS, "Seconds by which it then came after the first rank"),
    "sleeps": ("sleeps", 1.0, "Times that a thread of the core has slept until it was woken"),
    "rescued_wakeups": ("rescued_wakeups", 1.0, "Lost wake-ups, found by a timer; 0 without bugs"),
}
_HISTOGRAMS = {
    "negotiation_ns": ("negotiation_seconds", _NS, "Seconds from a submission until all agree"),
    "wait_ns": ("wait_seconds", _NS, "Seconds that a caller was blocked in one wait"),
    "bucket_bytes": ("bucket_bytes", 1.0, "Bytes of one bucket"),
    "bandwidth_MBps": (
        *("bandwidth_bytes_per_second", _MB),
        "Bytes of a bucket by the seconds from its launch to its end",
    ),
}


class Collector:
    """Reads this rank's metrics whenever Prometheus asks."""

    def collect(self) -> Iterator[Metric]:
        """One family for each counter, gauge and histogram, labelled with the rank."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        found, labels = metrics(), [str(rank())]
        for name, value in found.items():
            shown, factor, meaning = _COUNTERS[name]
            counter = CounterMetricFamily(f"farandole_{shown}", meaning, labels=["rank"])
            counter.add_metric(labels, value * factor)
            yield counter
        for name, one in found.histograms.items():
            shown, factor, meaning = _HISTOGRAMS[name]
            family = HistogramMetricFamily(f"farandole_{shown}", meaning, labels=["rank"])
            family.add_metric(labels, _histogram(one, factor), sum_value=one.sum * factor)
            yield family
        stalled = GaugeMetricFamily("farandole_stalled_calls", _STALLED, labels=["rank"])
        stalled.add_metric(labels, _stalled())
        yield stalled
        build = {"version": text(lib.farandole_version()), "core": text(lib.farandole_build_id())}
        info = GaugeMetricFamily(
            "farandole_build_info", "Always 1: the build is in the labels", labels=["rank", *build]
        )
        info.add_metric([*labels, *build.values()], 1)
        yield info


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
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError as reason:
        _warn(f"no metrics: {reason}; remedy: pip install prometheus_client")
        return
    registry = CollectorRegistry()
    registry.register(Collector())
    app = make_wsgi_app(registry)
    address, wanted = setting("FARANDOLE_METRICS_ADDRESS"), first + local_rank()
    refused: Exception | None = None
    # Every rank looks in a row of its own, so that two ranks never want the same port.
    for port in range(wanted, min(wanted + _TRIES * local_size(), _LAST_PORT + 1), local_size()):
        try:
            _server = ScrapeServer(address, port, app)
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
    warnings.warn(f"FARANDOLE_METRICS_PORT: {what}", RuntimeWarning, stacklevel=5)


def stop() -> None:
    """Stops serving. Idempotent."""
    global _server
    running, _server = _server, None
    if running is not None:
        running.close()


def _after_fork() -> None:
    """A forked worker must not keep the port."""
    global _server
    inherited, _server = _server, None
    if inherited is not None:
        inherited.forget()


os.register_at_fork(after_in_child=_after_fork)
