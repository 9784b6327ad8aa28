# SPDX-License-Identifier: Apache-2.0
"""What the timeline costs.

    mpirun -np 2 --bind-to none python benchmarks/timeline_cost.py [--steps 60]

Steps of forward, backward and optimizer with and without a timeline, in turns that all ranks take
together; medians of rank 0's wall time, and of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import farandole.torch as hvd


def build(layers: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A chain of linear layers, two gradients each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def step_time(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Seconds of one step, all ranks starting together."""
    hvd.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    model, optimizer = build(40, 256)
    x = torch.randn(128, 256)
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for step in range(options.steps + 5):
            for traced in (step % 2 == 0, step % 2 == 1):
                if traced:
                    hvd.start_timeline(Path(folder) / f"{hvd.rank()}.json")
                seconds = step_time(model, optimizer, x)
                hvd.stop_timeline()
                if step >= 5:
                    times[traced].append(seconds)
    if hvd.rank() == 0:
        plain, traced = (1e3 * float(np.median(times[on])) for on in (False, True))
        ratio = np.median(np.array(times[True]) / np.array(times[False]))
        print(f"{hvd.size()} ranks, 80 gradients, medians of {options.steps} steps")
        print(f"without a timeline {plain:.2f} ms, with one {traced:.2f} ms")
        print(f"median of the ratios of neighbouring steps {ratio:.3f}")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    main()
