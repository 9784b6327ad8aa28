# SPDX-License-Identifier: Apache-2.0
"""Exports a rank's metrics to Prometheus with prometheus_client. Its server answers anybody who
reaches the address, in a new thread each time: keep it at 127.0.0.1, or behind a firewall.

    mpirun -np 2 python examples/recipes/prometheus.py

Expected:
    every rank answers with its own counters: True
"""

from collections.abc import Iterator
from urllib.request import urlopen

import torch
from prometheus_client import Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import REGISTRY, Collector

import farandole.torch as hvd


class FarandoleCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        found = hvd.metrics()
        for name, value in found.items():
            yield CounterMetricFamily(f"farandole_{name}", name, value)
        for name, one in found.histograms.items():  # slot i counts values below 2**i
            slots = [(str(1 << i), sum(one.counts[: i + 1])) for i in range(len(one.counts))]
            slots.append(("+Inf", one.count))
            yield HistogramMetricFamily(f"farandole_{name}", name, slots, one.sum)


hvd.init()
REGISTRY.register(FarandoleCollector())
server, _ = start_http_server(0, "127.0.0.1")  # or 9100 + hvd.local_rank()
hvd.allreduce(torch.ones(3) * hvd.rank())
page = urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
told = f"farandole_tensors_done_total {float(hvd.metrics()['tensors_done'])}" in page
if all(hvd.allgather_object(told)) and hvd.rank() == 0:
    print("every rank answers with its own counters: True")
