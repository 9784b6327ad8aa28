# SPDX-License-Identifier: Apache-2.0
"""Networks of Flax, linen and nnx, with batch statistics, over farandole.jax: as one process on the
joined batch. In ranks, by run.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import numpy as jnp

import farandole.jax as hvd

STEPS, ROWS = 5, 8


def data(step: int, rank: int | None) -> tuple[Any, Any]:
    """Rows of a rank, or of all."""
    x = jax.random.normal(jax.random.key(step), (ROWS * hvd.size(), 6))
    y = jnp.sin(x.sum(1, keepdims=True))
    part = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return x[part], y[part]


def check(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert len(set(hvd.allgather_object(np.asarray(a).tobytes()))) == 1


class Network(linen.Module):
    """Dense, LayerNorm, Dense."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(1)(linen.LayerNorm()(linen.gelu(linen.Dense(16)(x))))


def fit_linen(optimizer: Any, rank: int | None, seed: int) -> Any:
    network = Network()
    params = network.init(jax.random.key(seed), jnp.zeros((1, 6)))
    if rank is not None:
        params = hvd.broadcast_parameters(params, root_rank=0)
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)

    @jax.jit
    def step(state: TrainState, x: Any, y: Any) -> TrainState:
        grads = jax.grad(lambda p: jnp.square(state.apply_fn(p, x) - y).mean())(state.params)
        return state.apply_gradients(grads=grads)

    for number in range(STEPS):
        state = step(state, *data(number, rank))
    return state.params


def test_linen() -> None:
    found = fit_linen(hvd.distributed(optax.adam(1e-2)), hvd.rank(), seed=hvd.rank())
    check(found, fit_linen(optax.adam(1e-2), None, seed=0))


def fit_nnx(optimizer: Any, rank: int | None, seed: int) -> Any:
    rngs = nnx.Rngs(seed)
    model = nnx.Sequential(nnx.Linear(6, 16, rngs=rngs), jnp.tanh, nnx.Linear(16, 1, rngs=rngs))
    if rank is not None:
        nnx.update(model, hvd.broadcast_parameters(nnx.state(model, nnx.Param), root_rank=0))
    trained = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, trained: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(lambda m: jnp.square(m(x) - y).mean())(model)
        trained.update(model, grads)

    for number in range(STEPS):
        step(model, trained, *data(number, rank))
    return nnx.state(model, nnx.Param)


def test_nnx() -> None:
    found = fit_nnx(hvd.distributed(optax.adam(1e-2)), hvd.rank(), seed=hvd.rank())
    check(found, fit_nnx(optax.adam(1e-2), None, seed=0))
