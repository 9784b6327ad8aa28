# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus, if FARANDOLE_METRICS_PORT asks: each rank has a port of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from farandole.config import config
from farandole.observe.metrics import Histogram, metrics
from farandole.topology import local_rank, rank

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["Collector", "serve", "stop"]

_server: Any = None  # (WSGIServer, Thread)


def _histogram(one: Histogram, factor: float) -> list[tuple[str, float]]:
    """Cumulative buckets; bounds in the metric's unit, the value times `factor`."""
    seen, found = 0, []
    for i, count in enumerate(one.counts):
        seen += count
        found.append((repr((1 << i) * factor), float(seen)))
    return [*found, ("+Inf", float(one.count))]


# Name and unit in Prometheus; what one of ours is in that unit.
_HISTOGRAMS = {
    "negotiation_ns": ("negotiation_seconds", 1e-9),
    "wait_ns": ("wait_seconds", 1e-9),
    "bucket_bytes": ("bucket_bytes", 1.0),
    "bandwidth_MBps": ("bandwidth_bytes_per_second", 1e6),
}


class Collector:
    """Asks for this rank's metrics whenever Prometheus does."""

    def collect(self) -> Iterator[Metric]:
        """One family for each counter and histogram, labelled with the rank."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        found, labels = metrics(), [str(rank())]
        for name, value in found.items():
            unit, factor = ("seconds", 1e-9) if name.endswith("_ns") else ("", 1.0)
            shown = f"farandole_{name.removesuffix('_ns')}{'_' + unit if unit else ''}"
            counter = CounterMetricFamily(shown, "see farandole.metrics()", labels=["rank"])
            counter.add_metric(labels, value * factor)
            yield counter
        for name, one in found.histograms.items():
            shown, factor = _HISTOGRAMS[name]
            family = HistogramMetricFamily(
                f"farandole_{shown}", "see farandole.metrics()", labels=["rank"]
            )
            family.add_metric(labels, _histogram(one, factor), sum_value=one.sum * factor)
            yield family


def serve() -> None:
    """Answers on FARANDOLE_METRICS_PORT + local rank until stop(), if that is set. init() calls it.

    Raises ImportError without prometheus_client, OSError where the port is taken.
    """
    global _server
    settings = {variable.name: variable.value for variable in config()}
    port = int(settings["FARANDOLE_METRICS_PORT"])
    if port == 0:
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as reason:
        raise ImportError(
            f"FARANDOLE_METRICS_PORT={port}: {reason}; remedy: pip install prometheus_client"
        ) from reason
    registry = CollectorRegistry()
    registry.register(Collector())
    address = settings["FARANDOLE_METRICS_ADDRESS"]
    try:
        _server = start_http_server(port + local_rank(), address, registry)
    except OSError as reason:
        raise OSError(
            f"FARANDOLE_METRICS_PORT: cannot answer on {address}:{port + local_rank()}: {reason}"
        ) from reason


def stop() -> None:
    """Stops answering. Idempotent."""
    global _server
    running, _server = _server, None
    if running is not None:
        server, thread = running
        server.shutdown()
        server.server_close()
        thread.join()


def _after_fork() -> None:
    """A forked worker must not keep the port."""
    global _server
    inherited, _server = _server, None
    if inherited is not None:
        inherited[0].socket.close()


os.register_at_fork(after_in_child=_after_fork)
