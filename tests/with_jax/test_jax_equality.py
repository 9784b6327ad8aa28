# SPDX-License-Identifier: Apache-2.0
"""Ranks whose pytrees differ are told so, with names, ranks and the likely cause."""

import warnings

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import farandole.jax as hvd

pytestmark = pytest.mark.ranks(2, 3)


def last():
    return hvd.size() - 1


def is_last():
    return hvd.rank() == last()


def model(seed=0):
    w, v = jax.random.normal(jax.random.key(seed), (2, 3, 4))
    return {"layers": [w, v.astype("bfloat16")], "scale": jnp.float32(1.5)}


def loss(params, x):
    w, v = params["layers"]
    return jnp.square(x @ w @ v.astype("float32").T * params["scale"]).mean()


def train(verifier, optimizer, params, steps, change=lambda number, params: params):
    """`change` plants a fault before a step."""

    @jax.jit
    def step(params, state, x):
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for number in range(steps):
        params = change(number, params)
        verifier(params, state)
        rows = jax.random.normal(jax.random.key(10 * number + hvd.rank()), (5, 3))
        params, state = step(params, state, rows)
    return params


def adam(rate=0.1):
    return hvd.distributed(optax.inject_hyperparams(optax.adam)(rate))


def test_no_broadcast():
    text = (
        r"model\.\d+, after 0 steps: .*: 2 of \d+ parameters \(\['layers'\]\[0\], "
        r"\['layers'\]\[1\]\) differ, on .* against .*: params = broadcast_parameters\(params"
    )
    with pytest.raises(hvd.MismatchError, match=text):
        train(hvd.ModelVerifier(verify="raise"), adam(), model(seed=hvd.rank()), 1)


def test_another_learning_rate():
    text = rf"\.hyperparams\['learning_rate'\] is 0\.1 on rank.*, 0\.4 on rank {last()}\. Give the"
    with pytest.raises(hvd.MismatchError, match=text):
        train(hvd.ModelVerifier(verify="raise"), adam(0.4 if is_last() else 0.1), model(), 1)


def test_another_learning_rate_that_the_state_does_not_have():
    text = rf"after 2 steps: .* on rank {last()} against .*equal after 0 steps: since then"
    optimizer = hvd.distributed(optax.sgd(0.4 if is_last() else 0.1))
    with pytest.raises(hvd.MismatchError, match=text):
        train(hvd.ModelVerifier(2, "raise"), optimizer, model(), 3)


def test_a_flipped_bit():
    def flip(number, params):
        if number != 4 or not is_last():
            return params
        bits = jax.lax.bitcast_convert_type(params["layers"][1], jnp.uint16)
        bits = bits.at[2, 1].set(bits[2, 1] ^ 1)
        flipped = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
        return {**params, "layers": [params["layers"][0], flipped]}

    text = (
        rf"after 4 steps: .*: 1 of \d+ parameters \(\['layers'\]\[1\]\) differs, on rank {last()} "
        ".*equal after 3 steps"
    )
    with pytest.raises(hvd.MismatchError, match=text):
        train(hvd.ModelVerifier(1, "raise"), adam(), model(), 6, flip)


def test_equal_models_are_told_nothing():
    """Adam's momenta are compared too, and gradients differ by rank."""
    params = hvd.broadcast_parameters(model(seed=hvd.rank()), root_rank=0)
    after = train(hvd.ModelVerifier(1, "raise"), adam(), params, 30)
    assert not np.array_equal(after["layers"][0], params["layers"][0])
    keys = {"w": jnp.ones(2), "dropout": jax.random.key(hvd.rank())}
    hvd.ModelVerifier(1, "raise")(keys, {"dropout": jax.random.key(hvd.rank())})


def test_sums_that_wait_to_be_reduced_are_not_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = hvd.distributed(optax.adam(0.1), every=3)
        train(hvd.ModelVerifier(1), optimizer, model(), 8)


def test_one_warning_is_enough():
    verifier = hvd.ModelVerifier(1)
    params = {"w": jnp.full(3, hvd.rank())}
    with pytest.warns(UserWarning, match="1 of 1 parameter .* differs, on"):
        verifier(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verifier(params)


def test_one_rank_that_raises_makes_all_raise():
    verifier = hvd.ModelVerifier(1, "raise" if is_last() else "warn")
    with pytest.raises(hvd.MismatchError, match="differs"):
        verifier({"w": jnp.full(3, hvd.rank())})


@pytest.mark.parametrize("others", [0, 5])
def test_the_smallest_interval_holds(others):
    verifier = hvd.ModelVerifier(2 if is_last() else others, "raise")
    for _ in range(4):
        verifier({"w": jnp.ones(3)})
    with pytest.raises(hvd.MismatchError, match=r"after 4 steps.*equal after 2 steps"):
        verifier({"w": jnp.full(3, hvd.rank())})


def test_never():
    verifier = hvd.ModelVerifier(0, "raise")
    for _ in range(2):
        verifier({"w": jnp.full(3, hvd.rank())})


def test_the_default_compares_the_first_step_and_no_other_soon():
    verifier = hvd.ModelVerifier(verify="raise")
    verifier({"w": jnp.ones(3)})
    for _ in range(20):
        verifier({"w": jnp.full(3, hvd.rank())})


def test_counts_restart_with_the_runtime():
    verifier = hvd.ModelVerifier(3, "raise")
    verifier({"w": jnp.ones(3)})
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.MismatchError, match=r"after 0 steps.*have not been equal before"):
        verifier({"w": jnp.full(3, hvd.rank())})


@pytest.mark.ranks(3)
def test_a_process_set():
    pair = hvd.add_process_set([0, 2])
    verifier = hvd.ModelVerifier(1, "raise", pair)
    verifier({"w": jnp.full(3, hvd.rank() % 2)})
    if hvd.rank() == 1:
        verifier({"w": jnp.ones(3)})
        return
    with pytest.raises(hvd.MismatchError, match="on rank 2 against rank 0"):
        verifier({"w": jnp.full(3, hvd.rank())})


def test_a_rank_that_can_not_say_makes_all_fail():
    verifier = hvd.ModelVerifier(1, "raise")
    with pytest.raises((TypeError, hvd.PeerError), match="w'] is of type str, not an array"):
        verifier({"w": "text" if is_last() else jnp.ones(3)})


def test_within_jit():
    verifier = hvd.ModelVerifier(1, "raise")
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(verifier)({"w": jnp.ones(3)})


def test_wrong_options():
    with pytest.raises(ValueError, match="verify is 'warn' or 'raise', not 'log'"):
        hvd.ModelVerifier(verify="log")
    with pytest.raises(ValueError, match="verify_every is -1"):
        hvd.ModelVerifier(-1)
