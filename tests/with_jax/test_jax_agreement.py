# SPDX-License-Identifier: Apache-2.0
"""same_on_all_ranks() compares JAX's arrays, trees of them, and keys of random numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import farandole as fd
import farandole.jax as hvd
from harness.ranks import last

pytestmark = pytest.mark.ranks(2, 3)


def state(seed: int) -> Any:
    """Parameters, and an optimizer's state after a step."""
    params = {"dense": {"w": jax.random.normal(jax.random.key(seed), (4, 3)), "b": jnp.ones(3)}}
    adam = optax.adam(1e-3)
    return params, adam.update(params, adam.init(params), params)[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: jnp.full((2, 3), x, jnp.bfloat16),
        lambda x: jnp.asarray(x, jnp.int8),
        lambda x: jnp.asarray([1j * x, 1]),
        lambda x: jax.random.key(x),
        lambda x: jax.random.split(jax.random.key(x), 3),
        state,
    ],
    ids=["bfloat16", "scalar", "complex", "key", "keys", "state"],
)
def test_values(make: Any) -> None:
    value = make(7)
    assert hvd.same_on_all_ranks(value) is value
    with pytest.raises(fd.MismatchError, match=rf"on rank {last()}") as caught:
        hvd.same_on_all_ranks(make(8 if hvd.rank() == last() else 7), name="it")
    assert "'it' differs between ranks: " in str(caught.value)


def test_the_path_of_what_differs() -> None:
    params, opt_state = state(7)
    if hvd.rank() == last():
        opt_state[0].mu["dense"]["b"] = jnp.zeros(3)
    with pytest.raises(fd.MismatchError, match=re.escape("value[1][0]")) as caught:
        hvd.same_on_all_ranks((params, opt_state))
    assert "['dense']['b'] is [" in str(caught.value)
    assert "[0.0, 0.0, 0.0] (float32(3,)" in str(caught.value)


def test_within_jit_it_says_that_values_are_not_known() -> None:
    with pytest.raises(TypeError, match="no values yet; remedy: compare outside of jit"):
        jax.jit(lambda x: hvd.same_on_all_ranks(x))(jnp.ones(2))
    np.testing.assert_array_equal(hvd.allreduce(jnp.ones(2)), np.ones(2))
