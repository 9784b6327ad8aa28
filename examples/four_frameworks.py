# SPDX-License-Identifier: Apache-2.0
"""One model, four frameworks: each rank computes its gradient with one of them, and all ranks meet
in one allreduce.

    pip install "jax[cpu]" torch tensorflow scikit-learn
    mpirun -np 4 python examples/four_frameworks.py          # any number of ranks

Rank 0 uses JAX, within jit; rank 1 torch; rank 2 TensorFlow, inside tf.function; rank 3 NumPy; rank
4 JAX again. Calls with the same name match, whatever arrays they pass. Expected in half a minute:

    rank 0 trains with JAX: accuracy 0.89...
    rank 1 trains with torch: accuracy 0.89...        (the same number on all ranks)
    ...
"""

from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

import farandole as fd

STEPS, RATE, TRAINED = 300, 0.5, 1400

Array = np.ndarray
Gradient = Callable[[Array], Array]  # weights (65, 10) -> gradient, averaged over the ranks


def with_jax(x: Array, y: Array) -> Gradient:
    import jax

    import farandole.jax as hvd

    def loss(w: jax.Array) -> jax.Array:
        return -(y * jax.nn.log_softmax(x @ w)).sum(1).mean()

    gradient = jax.jit(hvd.grad(loss, name="gradient"))
    return lambda w: np.asarray(gradient(w))


def with_torch(x: Array, y: Array) -> Gradient:
    import torch

    import farandole.torch as hvd

    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def gradient(w: Array) -> Array:
        weights = torch.from_numpy(w).requires_grad_()
        loss = torch.nn.functional.cross_entropy(inputs @ weights, targets)
        (found,) = torch.autograd.grad(loss, weights)
        return hvd.allreduce(found, name="gradient").numpy()

    return gradient


def with_tensorflow(x: Array, y: Array) -> Gradient:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    @tf.function
    def gradient(w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, x @ w))
        return hvd.allreduce(tape.gradient(loss, w), name="gradient")

    return lambda w: gradient(tf.constant(w)).numpy()


def with_numpy(x: Array, y: Array) -> Gradient:
    def gradient(w: Array) -> Array:
        scores = np.exp(x @ w)
        errors = scores / scores.sum(1, keepdims=True) - y
        return fd.allreduce(x.T @ errors / np.float32(len(x)), name="gradient")

    return gradient


FRAMEWORKS = {
    "JAX": with_jax,
    "torch": with_torch,
    "TensorFlow": with_tensorflow,
    "NumPy": with_numpy,
}


def main() -> None:
    fd.init()
    framework = list(FRAMEWORKS)[fd.rank() % len(FRAMEWORKS)]
    digits = load_digits()
    x = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))]).astype("float32")
    y = np.eye(10, dtype="float32")[digits.target]
    mine = slice(fd.rank(), TRAINED, fd.size())
    gradient = FRAMEWORKS[framework](x[mine], y[mine])
    w = np.zeros((65, 10), "float32")
    for _ in range(STEPS):
        w -= RATE * gradient(w)
    right = (x[TRAINED:] @ w).argmax(1) == digits.target[TRAINED:]
    print(f"rank {fd.rank()} trains with {framework}: accuracy {right.mean():.3f}", flush=True)
    own = w.tobytes()
    if any(theirs != own for theirs in fd.allgather_object(own)):
        raise SystemExit("the weights differ between ranks")


if __name__ == "__main__":
    main()
