# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and Local SGD beside synchronous training: loss and accuracy against bytes sent.

    python benchmarks/diloco.py [--rate 10mbit] [--steps 400] [--seeds 1]    # needs root

Two simulated hosts of one rank each, whose link is shaped by tc. Each way of training takes as many
steps on the same batches: the perceptron of compression.py on scikit-learn's digits. Printed, means
over the seeds: loss on all training data at the end, test accuracy, `sent`, which is what left a
host for one training by the kernel's counters, and the time of a training. Rank 0's model counts;
the steps are a multiple of every period, so it is the common one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from compression import MARK, ROOT, digits, sent

WAYS: dict[str, dict[str, Any] | None] = {  # options of DiLoCo; None: DistributedOptimizer
    "synchronous": None,
    "local SGD, 10": {"every": 10},
    "local SGD, 50": {"every": 50},
    "DiLoCo, 10": {"every": 10, "outer": (0.7, 0.9)},
    "DiLoCo, 50": {"every": 50, "outer": (0.7, 0.9)},
    "delayed, 10": {"every": 10, "outer": (0.5, 0.0), "overlap": True},
    "delayed, 50": {"every": 50, "outer": (0.5, 0.0), "overlap": True},
}


def train(way: dict[str, Any] | None, seed: int, steps: int) -> list[float]:
    """Loss, test accuracy, bytes sent and seconds, of this rank."""
    import torch
    from torch.nn.functional import cross_entropy

    import farandole.torch as hvd

    torch.manual_seed(seed)
    net, optimizer, x, y, x_test, y_test = digits(seed)
    diloco: Any = None
    if way is None:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    else:
        options = dict(way)
        lr, momentum = options.pop("outer", (0.0, 0.0))
        sgd: Callable[..., Any] = torch.optim.SGD
        outer = sgd(net.parameters(), lr, momentum, nesterov=momentum > 0) if lr else None
        diloco = hvd.DiLoCo(net.parameters(), outer, **options)
    draw = torch.Generator().manual_seed(100 * seed + hvd.rank())
    hvd.barrier()
    before, begin = sent(), time.perf_counter()
    for _ in range(steps):
        batch = torch.randint(0, len(x), (32,), generator=draw)
        optimizer.zero_grad()
        cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
        if diloco is not None:
            diloco.step()
    hvd.barrier()
    seconds, nbytes = time.perf_counter() - begin, sent() - before
    with torch.no_grad():
        right = (net(x_test).argmax(-1) == y_test).float().mean().item()
        return [cross_entropy(net(x), y).item(), right, nbytes, seconds]


def job(seeds: int, steps: int) -> None:
    """Prints a row for each training; ways take turns."""
    import torch

    import farandole.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for seed in range(seeds):
        for name, way in WAYS.items():
            row = train(way, seed, steps)
            if hvd.rank() == 0:
                print(MARK + json.dumps([name, *row]), flush=True)


def measure(rate: str, seeds: int, steps: int) -> None:
    """Prints the table."""
    from harness.hosts import simulated_hosts, why_not
    from harness.mpirun import MpiJob

    if reason := why_not():
        sys.exit(f"simulated hosts: {reason}")
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder, simulated_hosts(Path(folder), [1, 1]) as hosts:
        hosts.shape(rate)
        argv = [sys.executable, __file__, "--job", "--seeds", str(seeds), "--steps", str(steps)]
        env = {**hosts.environment(), "OMP_NUM_THREADS": "1"}
        with MpiJob(argv, 2, env, hosts.mpi_args()) as running:
            for line in running.process.lines():
                if line.startswith(MARK):
                    name, *row = json.loads(line.removeprefix(MARK))
                    found.setdefault(name, []).append(row)
            running.finish(30).check()
    print(f"{'way':15}{'loss':>9}{'accuracy':>10}{'sent MB':>9}{'seconds':>9}")
    for name, rows in found.items():
        loss, right, nbytes, seconds = map(mean, zip(*rows, strict=True))
        print(f"{name:15}{loss:9.4f}{right:10.4f}{nbytes / 1e6:9.2f}{seconds:9.2f}")


def main() -> None:
    # Ended by `kill` or `timeout`, it removes its hosts, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="10mbit", help="of the link, as tc has it")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.seeds, options.steps)
    else:
        measure(options.rate, options.seeds, options.steps)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
