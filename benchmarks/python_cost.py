# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time that DistributedOptimizer costs the main thread, for each gradient.

    mpirun -np 2 --bind-to none python benchmarks/python_cost.py [--steps 200]

Takes time.thread_time of a backward pass of 161 gradients and synchronize(), minus that of the same
pass in no_sync(); the two alternate. Gradients have only 16 elements each, because the waiting
thread may add them: so hooks, submission and waiting dominate. Parts are also measured alone: the
raw C calls (submit_tensor, wait, release), a plain Python hook, and, instead of hooks, a named
allreduce_async_ and its wait().
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import numpy as np
import resnet50
import torch
from turns import print_head

import farandole
import farandole.torch as hvd
from farandole.calls import leases
from farandole.calls.handles import wait_until
from farandole.calls.requests import Call, Op, PreparedCall
from farandole.torch.kind import describe

COUNT, ELEMENTS = resnet50.COUNT, 16
FASTEST = 0.05  # share of the turns: other programs on the machine slow most of them


def alternate(runs: dict[str, Callable[[], float]], steps: int) -> dict[str, np.ndarray]:
    """Seconds of each run in each of `steps` turns, after 10 that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()
    for step in range(steps + 10):
        for name, run in runs.items():
            hvd.barrier()
            seconds = run()
            if step >= 10:
                times[name].append(seconds)
        if step % 50 == 0:
            gc.collect()
    gc.enable()
    return {name: np.array(t) for name, t in times.items()}


def prepared() -> Callable[[], tuple[float, float]]:
    """Returns a function that gives seconds (to submit, to wait and release) by C calls alone."""
    tensors = [torch.zeros(ELEMENTS) for _ in range(COUNT)]
    kept = [
        PreparedCall(Call(Op.ALLREDUCE, f"prepared.{i}"), describe(x))
        for i, x in enumerate(tensors)
    ]

    def run() -> tuple[float, float]:
        pointers = [x.data_ptr() for x in tensors]
        start = thread_time()
        triples = zip(kept, pointers, tensors, strict=True)
        handles = [t.submit(p, p, x) for t, p, x in triples]
        submitted = thread_time()
        wait_until(handles, None)
        leases.end(handles)
        return submitted - start, thread_time() - submitted

    return run


def named(allreduce: Callable[..., Any], tensors: Sequence[Any], prefix: str) -> float:
    """Seconds of a named call for each tensor and all waits. Raises ValueError for a wrong sum."""
    names = [f"{prefix}.{i}" for i in range(len(tensors))]
    for x in tensors:
        x[:] = hvd.rank() + 1
    start = thread_time()
    handles = [allreduce(x, op=hvd.Sum, name=n) for x, n in zip(tensors, names, strict=True)]
    for handle in handles:
        handle.wait()
    seconds = thread_time() - start
    total = sum(range(1, hvd.size() + 1))
    if any(float(x[i]) != total for x in tensors for i in (0, ELEMENTS - 1)):
        raise ValueError(f"{prefix}: a sum is wrong")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    model, hooked, plain = (resnet50.Chain([(ELEMENTS,)] * COUNT, hvd.rank()) for _ in range(3))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for weight in hooked.weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)
    x = torch.zeros((), requires_grad=True)
    parts = prepared()
    arrays = [np.zeros(ELEMENTS, np.float32) for _ in range(COUNT)]
    tensors = [torch.zeros(ELEMENTS) for _ in range(COUNT)]
    submits: list[float] = []
    waits: list[float] = []
    wrong = 0

    def backward(chain: resnet50.Chain) -> float:
        chain.clear()
        start = thread_time()
        chain(x).backward()
        return thread_time() - start

    def step() -> float:
        nonlocal wrong
        seconds = backward(model)
        start = thread_time()
        optimizer.synchronize()
        seconds += thread_time() - start
        wrong += model.wrong(range(hvd.size()))
        return seconds

    def local() -> float:
        with optimizer.no_sync():
            return backward(model)

    def calls() -> float:
        submitting, waiting = parts()
        submits.append(submitting)
        waits.append(waiting)
        return submitting + waiting

    runs = {"step": step, "no_sync": local, "hooked": lambda: backward(hooked)}
    runs |= {"plain": lambda: backward(plain), "calls": calls}
    runs["torch"] = lambda: named(hvd.allreduce_async_, tensors, "torch")
    runs["numpy"] = lambda: named(farandole.allreduce_async_, arrays, "numpy")
    times = alternate(runs, options.steps)

    def us(seconds: np.ndarray, less: np.ndarray | None = None) -> tuple[float, float]:
        """For each gradient: (median, time of the fastest turns)."""
        median = np.median(seconds if less is None else seconds - less)
        fastest = np.quantile(seconds, FASTEST)
        if less is not None:
            fastest -= np.quantile(less, FASTEST)
        return 1e6 * float(median) / COUNT, 1e6 * float(fastest) / COUNT

    lines = {
        "hooks + submit + wait (step - plain backward)": us(times["step"], times["plain"]),
        "  of these a Python hook that does nothing": us(times["hooked"], times["plain"]),
        "  of these the hooks in no_sync()": us(times["no_sync"], times["plain"]),
        "  of these C submit from Python": us(np.array(submits)),
        "  of these C wait and release": us(np.array(waits)),
        "allreduce_async_ and wait, torch": us(times["torch"]),
        "allreduce_async_ and wait, numpy": us(times["numpy"]),
    }
    everywhere = hvd.allgather_object(lines)
    print_head(f"main-thread CPU us for each of {COUNT} gradients, rank by rank: median of")
    if hvd.rank() == 0:
        print(f"{options.steps} steps, and in brackets the time of the fastest {FASTEST:.0%}")
        for name in lines:
            cells = (f"{rank[name][0]:8.2f} ({rank[name][1]:.2f})" for rank in everywhere)
            print(f"{name:50}", *cells)
        print(f"# wrong: {wrong}")
    hvd.shutdown()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
