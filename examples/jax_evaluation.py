# SPDX-License-Identifier: Apache-2.0
"""One job, two kinds of ranks: all but the last train with JAX; the last evaluates with NumPy.

    mpirun -np 3 python examples/jax_evaluation.py           # or more

The training ranks form a process set, in which jit reduces the gradients. After each epoch they
send the weights to the last rank, which never imports JAX: calls with the same name match, whatever
arrays they pass. Expected, from the last rank:
    epoch 1: accuracy 0.86.
    ...
    epoch 5: accuracy 0.88.
"""

import numpy as np
from sklearn.datasets import load_digits

import farandole as fd

EPOCHS, STEPS, LEARNING_RATE = 5, 40, 0.5
SHAPE = (65, 10)  # the last row is the bias


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Inputs with a column of ones, shape (rows, 65), and labels."""
    x, y = load_digits(return_X_y=True)
    return np.hstack([x / 16, np.ones((len(x), 1))]).astype("float32"), y


def train(trainers: fd.ProcessSet) -> None:
    import jax
    from jax import numpy as jnp

    import farandole.jax as hvd

    x, y = digits()
    mine = slice(hvd.rank(), 1400, trainers.size())  # the rest is for the evaluator
    x, y = jnp.asarray(x[mine]), jax.nn.one_hot(y[mine], 10)

    def loss_of(weights: jax.Array) -> jax.Array:
        return -(y * jax.nn.log_softmax(x @ weights)).sum(1).mean()

    gradient = hvd.grad(loss_of, process_set=trainers)

    @jax.jit
    def epoch(weights: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, w: w - LEARNING_RATE * gradient(w), weights)

    weights = jnp.zeros(SHAPE)
    for _ in range(EPOCHS):
        weights = epoch(weights)
        hvd.broadcast(weights, root_rank=0, name="weights")


def evaluate() -> None:
    x, y = digits()
    for epoch in range(EPOCHS):
        weights = fd.broadcast(np.empty(SHAPE, "float32"), root_rank=0, name="weights")
        accuracy = np.mean((x[1400:] @ weights).argmax(1) == y[1400:])
        print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}", flush=True)


def main() -> None:
    fd.init()
    if fd.size() < 2:
        raise SystemExit("this needs two ranks or more: mpirun -np 3 python jax_evaluation.py")
    trainers = fd.add_process_set(range(fd.size() - 1))
    if trainers.included():
        train(trainers)
    else:
        evaluate()


if __name__ == "__main__":
    main()
