# SPDX-License-Identifier: Apache-2.0
"""Compares ParameterServer with synchronous training, on ranks of which one is slow.

    python benchmarks/parameter_server.py [--ranks 4] [--seconds 6] [--step 0.1]

A rank's step takes --step seconds; the slow rank's takes twice as long. After computing, a rank
sleeps for the rest of a step, so that ranks do not compete for cores. The slow rank is always the
last one (`fixed`), or changes with each step (`turns`). Each way of training gets the same time:

    sync        an allreduce of each step's gradients
    0, 4, any   a ParameterServer, by staleness

`batches/s` counts all ranks' batches; `ratio` compares it with sync's. Digits (scikit-learn's) is a
perceptron that is pulled and pushed completely; its `quality` is the test accuracy. Ratings has
factors of 20,000 users and items, of which a batch needs 128; its `quality` is the RMSE of unseen
ratings, whose noise is 0.1. `ahead`: the most clocks that a rank knew to be ahead of the slowest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jobs import rows_of, tell
from numpy.typing import NDArray

import farandole as hvd

Array = NDArray[Any]
WAYS: dict[str, Any] = {"sync": "sync", "0": 0, "4": 4, "any": None}


class Digits:
    """A perceptron with one hidden layer; its parameters are rows of 65 numbers."""

    shape = (64 + 11, 65)
    rate = 0.05

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        parts = train_test_split(x / 16, y, test_size=0.25, random_state=0, stratify=y)
        self.x, self.x_test, self.y, self.y_test = parts
        self.draw = np.random.default_rng(hvd.rank())

    def first(self, rows: Array) -> Array:
        return np.stack([0.1 * np.random.default_rng(row).normal(size=65) for row in rows])

    def batch(self) -> tuple[Array | None, Any]:
        return None, self.draw.integers(0, len(self.x), 32)

    def _forward(self, table: Array, x: Array) -> tuple[Array, Array]:
        hidden = np.maximum(x @ table[:64, :64].T + table[:64, 64], 0)
        out = hidden @ table[64:74, :64].T + table[64:74, 64]
        e = np.exp(out - out.max(1, keepdims=True))
        return hidden, e / e.sum(1, keepdims=True)

    def gradient(self, table: Array, batch: Any) -> Array:
        x = self.x[batch]
        hidden, p = self._forward(table, x)
        p[np.arange(len(x)), self.y[batch]] -= 1
        p /= len(x)
        grad = np.zeros(self.shape)
        grad[64:74, :64], grad[64:74, 64] = p.T @ hidden, p.sum(0)
        back = (p @ table[64:74, :64]) * (hidden > 0)
        grad[:64, :64], grad[:64, 64] = back.T @ x, back.sum(0)
        return grad

    def quality(self, table: Array) -> float:
        return float((self._forward(table, self.x_test)[1].argmax(1) == self.y_test).mean())


class Ratings:
    """A rating is the dot product of 8 factors of a user and of an item, each of which is a row."""

    shape = (20000, 8)
    rate = 2.0

    def __init__(self) -> None:
        self.truth = np.random.default_rng(1).normal(size=self.shape) / 8**0.25
        self.draw = np.random.default_rng(hvd.rank())

    def first(self, rows: Array) -> Array:
        near = self.truth[rows]  # plus noise of half its length, so that seconds of training show
        return near + 0.5 * np.random.default_rng(rows[0]).normal(size=near.shape) / 8**0.25

    def _ratings(self, draw: np.random.Generator, count: int) -> tuple[Array, Array]:
        pairs = draw.integers(0, 200, (count, 2)) + np.array([0, 10000])  # the popular ones
        noise = 0.1 * draw.normal(size=count)
        return pairs, (self.truth[pairs[:, 0]] * self.truth[pairs[:, 1]]).sum(1) + noise

    def batch(self) -> tuple[Array | None, Any]:
        pairs, ratings = self._ratings(self.draw, 64)
        return pairs.reshape(-1), ratings

    def gradient(self, rows: Array, ratings: Any) -> Array:
        users, items = rows[0::2], rows[1::2]
        wrong = ((users * items).sum(1) - ratings)[:, None] / len(ratings)
        return np.stack([wrong * items, wrong * users], 1).reshape(rows.shape)

    def quality(self, table: Array) -> float:
        pairs, ratings = self._ratings(np.random.default_rng(99), 4000)
        guess = (table[pairs[:, 0]] * table[pairs[:, 1]]).sum(1)
        return float(np.sqrt(np.mean((guess - ratings) ** 2)))


def computed(begin: float, step: int, slow: str, length: float) -> None:
    """Sleeps until the step's computing time is over."""
    turn = hvd.size() - 1 if slow == "fixed" else (step * 7919) % hvd.size()
    time.sleep(max(0.0, begin + length * (1 + (turn == hvd.rank())) - time.perf_counter()))


def synchronous(task: Any, slow: str, seconds: float, length: float) -> tuple[int, float, float]:
    """Returns this rank's steps, the quality, and 0."""
    table, steps = task.first(np.arange(task.shape[0])), 0
    end = time.perf_counter() + seconds
    while hvd.allreduce(np.array([time.perf_counter() < end]), op=hvd.Min, name="more")[0]:
        begin = time.perf_counter()
        rows, batch = task.batch()
        gradient = task.gradient(table if rows is None else table[rows], batch)
        computed(begin, steps, slow, length)
        steps += 1
        rate = task.rate
        if rows is None:
            table -= rate * hvd.allreduce(gradient, name="gradient", op=hvd.Sum)
        else:
            everyones = hvd.allgather(rows, name="rows")
            np.subtract.at(table, everyones, rate * hvd.allgather(gradient, name="values"))
    return steps, task.quality(table), 0.0


def served(
    task: Any, slow: str, seconds: float, length: float, staleness: int | None
) -> tuple[int, float, float]:
    """Returns this rank's steps, the quality, and the most clocks that it was ahead."""
    steps, ahead, rate = 0, 0.0, task.rate
    update: Callable[[Array, Array], Array] = lambda old, grad: old - rate * grad  # noqa: E731
    with hvd.ParameterServer(
        task.shape, "float64", initial=task.first, update=update, staleness=staleness
    ) as server:
        hvd.barrier()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            rows, batch = task.batch()
            table = server.pull(rows)
            begin = time.perf_counter()
            gradient = task.gradient(table, batch)
            computed(begin, steps, slow, length)
            server.push(rows, gradient)
            server.clock()
            steps += 1
            ahead = max(ahead, steps - min(server.clocks))
        quality = task.quality(server.pull())  # waits for ranks that are behind
    return steps, quality, ahead


def job(seconds: float, length: float) -> None:
    hvd.init()
    for kind in (Digits, Ratings):
        for slow in ("fixed", "turns"):
            for way, staleness in WAYS.items():
                task = kind()
                if way == "sync":
                    steps, quality, ahead = synchronous(task, slow, seconds, length)
                else:
                    steps, quality, ahead = served(task, slow, seconds, length, staleness)
                told = hvd.allgather_object((steps, ahead))
                if hvd.rank() == 0:
                    batches = sum(one[0] for one in told) / seconds
                    tell([kind.__name__, slow, way, batches, quality, max(a for _, a in told)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="per way of training")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of computing in a step")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.seconds, options.step)
        return
    arguments = ["--job", f"--seconds={options.seconds}", f"--step={options.step}"]
    print(f"{'task':8}{'slow':7}{'way':6}{'batches/s':>10}{'ratio':>7}{'quality':>9}{'ahead':>7}")
    base = 0.0
    for task, slow, way, batches, quality, ahead in rows_of([__file__, *arguments], options.ranks):
        base = batches if way == "sync" else base
        rates = f"{batches:10.1f}{batches / base:7.2f}"
        print(f"{task:8}{slow:7}{way:6}{rates}{quality:9.4f}{ahead:7.0f}", flush=True)


if __name__ == "__main__":
    main()
