# SPDX-License-Identifier: Apache-2.0
"""Every optimizer of optax over farandole.jax, beside one process with all gradients. In ranks, by
run.py."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import farandole.jax as hvd

STEPS, ROWS = 3, 8


def makers() -> dict[str, Any]:
    """Public functions that make an optimizer of a learning rate alone."""
    found = {}
    for name in sorted(dir(optax)):
        make = getattr(optax, name)
        if name.startswith("_") or not inspect.isfunction(make):
            continue
        fields = inspect.signature(make).parameters
        needed = [f for f in fields.values() if f.default is f.empty and f.kind != f.VAR_KEYWORD]
        if [f.name for f in needed] == ["learning_rate"]:
            found[name] = make
    return found


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w": jax.random.normal(keys[0], (6, 4)), "b": 0.1 * jax.random.normal(keys[1], (4,))}


def loss(params: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - 0.5).mean()


def gradient(params: Any, rank: int, step: int) -> Any:
    x = jax.random.normal(jax.random.key(100 * step + rank), (ROWS, 6))
    return jax.grad(loss)(params, x)


def train(optimizer: Any, ranks: list[int]) -> Any:
    params = parameters()
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, number: int) -> Any:
        each = [gradient(params, rank, number) for rank in ranks]
        grads = jax.tree.map(lambda *parts: sum(parts) / len(parts), *each)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        params, state = step(params, state, number)
    return params


def test_there_are_many() -> None:
    assert len(makers()) >= 20


@pytest.mark.parametrize("name", makers())
def test_as_one_process(name: str) -> None:
    make = makers()[name]
    try:
        expected = train(make(0.01), list(range(hvd.size())))
    except (TypeError, ValueError) as reason:
        pytest.skip(f"alone it does not take this: {reason}")
    found = train(hvd.distributed(make(0.01)), [hvd.rank()])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        everywhere = hvd.allgather_object(np.asarray(a).tobytes())
        assert len(set(everywhere)) == 1
