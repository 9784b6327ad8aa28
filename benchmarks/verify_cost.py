# SPDX-License-Identifier: Apache-2.0
"""What comparing the ranks' models costs.

    mpirun -np 2 --bind-to none python benchmarks/verify_cost.py [--width 1024] [--every 1000]

Steps of forward, backward and optimizer, of which each compares the models, and steps of which none
does, in turns that all ranks take together. It prints medians of rank 0's wall time, of one
comparison, and the ratio of a training that compares every so many steps to one that never does.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from timeline_cost import step_time

import farandole.torch as hvd


def build(layers: int, width: int, every: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A chain of linear layers, two gradients each, equal on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named, verify_every=every, verify="raise")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--every", type=int, default=1000, help="of the ratio")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    pairs = {every: build(options.layers, options.width, every) for every in (0, 1)}
    x = torch.randn(options.batch, options.width)
    times: dict[int, list[float]] = {0: [], 1: []}
    for step in range(options.steps + 3):
        for every in (0, 1) if step % 2 else (1, 0):
            seconds = step_time(*pairs[every], x)
            if step >= 3:
                times[every].append(seconds)
    if hvd.rank() == 0:
        without = float(np.median(times[0]))
        comparison = float(np.median(np.array(times[1]) - np.array(times[0])))
        mib = sum(p.nbytes for p in pairs[0][0].parameters()) / (1 << 20)
        print(f"{hvd.size()} ranks, {mib:.0f} MiB of parameters, medians of {options.steps} turns")
        print(f"a step {1e3 * without:.2f} ms, a comparison {1e3 * comparison:.2f} ms more")
        print(f"one in {options.every} steps: {1 + comparison / without / options.every:.5f} x")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    main()
