# SPDX-License-Identifier: Apache-2.0
"""A parameter server trains two models: digits, and an embedding of users and items.

    python examples/parameter_server.py
    mpirun -np 4 python examples/parameter_server.py

Ranks may be two steps ahead of the slowest one, so each run rounds differently. Expected on up to 4
ranks, within a minute: a test accuracy of at least 0.94 on the digits, and an RMSE of at most 0.12
on unseen ratings, whose noise is 0.1:
    digits: test accuracy 0.9...
    ratings: RMSE 0.1..., of which 0.100 is noise
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import farandole as hvd

STALENESS = 2


def train_digits(batches: int = 1200) -> float:
    """Softmax regression. Each batch pulls and pushes the table (10 digits, 64 pixels and a bias).

    Returns the test accuracy.
    """
    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    draw = np.random.default_rng(hvd.rank())  # every rank draws its own batches
    with hvd.ParameterServer(
        (10, 65), update=lambda table, gradient: table - 0.2 * gradient, staleness=STALENESS
    ) as server:
        for _ in range(batches // hvd.size()):
            batch = draw.integers(0, len(x), 32)
            logits = x[batch] @ server.pull().T
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(32), y[batch]] -= 1
            server.push(None, p.T @ x[batch] / 32)
            server.clock()
        hvd.barrier()  # all ranks have pushed everything
        return float(((x_test @ server.pull().T).argmax(1) == y_test).mean())


def train_ratings(batches: int = 4000, users: int = 300, items: int = 200) -> float:
    """A rating is the product of a user's and an item's row of 4 factors, plus noise of 0.1.

    A batch pulls and pushes only the rows that it needs. Returns the RMSE of unseen ratings.
    """
    truth = np.random.default_rng(7).normal(size=(users + items, 4)) / 2

    def ratings(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.stack([draw.integers(0, users, count), draw.integers(users, len(truth), count)])
        return pairs, (truth[pairs[0]] * truth[pairs[1]]).sum(1) + 0.1 * draw.normal(size=count)

    def first(rows: np.ndarray) -> np.ndarray:
        return np.stack([np.random.default_rng(row).normal(size=4) / 4 for row in rows])

    draw = np.random.default_rng(hvd.rank())
    with hvd.ParameterServer(
        truth.shape,
        initial=first,
        update=lambda rows, gradient: rows - 0.2 * gradient,
        staleness=STALENESS,
    ) as server:
        for _ in range(batches // hvd.size()):
            pairs, rated = ratings(draw, 64)
            rows = server.pull(pairs.reshape(-1))
            user, item = rows[:64], rows[64:]
            wrong = ((user * item).sum(1) - rated)[:, None]
            server.push(pairs.reshape(-1), np.concatenate([wrong * item, wrong * user]))
            server.clock()
        hvd.barrier()
        table = server.pull()
    pairs, rated = ratings(np.random.default_rng(99), 4000)
    return float(np.sqrt(np.mean(((table[pairs[0]] * table[pairs[1]]).sum(1) - rated) ** 2)))


def main() -> None:
    hvd.init()
    accuracy, error = train_digits(), train_ratings()
    if hvd.rank() == 0:
        print(f"digits: test accuracy {accuracy:.3f}")
        print(f"ratings: RMSE {error:.3f}, of which 0.100 is noise")


if __name__ == "__main__":
    main()
