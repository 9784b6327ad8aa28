# SPDX-License-Identifier: Apache-2.0
"""Commits of elastic training with JAX's arrays and optax's states, written to and read from disk
without a pickle."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from farandole.commits import Saved, read_commit, write_commit


@pytest.mark.ranks(1)
def test_arrays_and_states_come_back(tmp_path: Path) -> None:
    params = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.ones(3, jnp.bfloat16),
        "empty": jnp.zeros(0),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    first = optimizer.init(params)
    gradients = jax.tree.map(lambda x: x + 1, params)
    _, trained = optimizer.update(gradients, first, params)
    values = {"params": params, "optimizer": trained, "step": 3}
    write_commit(tmp_path / "kept" / "call-1", Saved(values))
    like = Saved({"params": params, "optimizer": first})
    read = read_commit(tmp_path / "kept" / "call-1", like)
    assert read is not None
    found = read.values
    assert jax.tree.structure(found) == jax.tree.structure(values)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
        assert type(a) is type(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.ranks(1)
def test_a_key_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="state, key: "):
        write_commit(tmp_path / "kept" / "call-1", Saved({"key": jax.random.key(1)}))
