# SPDX-License-Identifier: Apache-2.0
"""Nonsense on one rank, within jit: an error with our text on every rank, and then life goes on."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import farandole as fd
import farandole.jax as hvd

pytestmark = pytest.mark.ranks(2, 3, 4)

Failed = jax.errors.JaxRuntimeError


@pytest.fixture(autouse=True)
def _still_usable():
    yield
    total = hvd.size() * (hvd.size() + 1) / 2
    x = jnp.full(3, hvd.rank() + 1.0)
    for _ in range(2):
        assert jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(x).tolist() == [total] * 3
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [total] * 3


def is_last():
    return hvd.rank() == hvd.size() - 1


def run(function, *arrays):
    return jax.block_until_ready(jax.jit(function)(*arrays))


LARGE = 1 << 20
MISMATCHES = {
    "shape": lambda name: lambda x: hvd.allreduce(x[: 3 + is_last()], name=name),
    "large shape": lambda name: lambda x: hvd.allreduce(x[: LARGE - 1 - is_last()], name=name),
    "dtype": lambda name: lambda x: hvd.allreduce(x.astype("int32") if is_last() else x, name=name),
    "op": lambda name: lambda x: hvd.allreduce(x, op=hvd.Max if is_last() else hvd.Sum, name=name),
    "operation": lambda name: (
        lambda x: (hvd.allgather if is_last() else hvd.allreduce)(x, name=name)
    ),
    "root": lambda name: lambda x: hvd.broadcast(x, int(is_last()), name=name),
    "number of tensors": lambda name: lambda x: hvd.allreduce([x] * (2 + is_last()), name=name),
    "rows' shape": lambda name: (
        lambda x: hvd.allgather(x[:6].reshape((2, 3) if is_last() else (3, 2)), name=name)
    ),
}


@pytest.mark.parametrize("name", [None, "disputed"])
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatches(what, name):
    with pytest.raises(Failed, match=r"farandole\.MismatchError: ") as caught:
        run(MISMATCHES[what](name), jnp.ones(LARGE))
    assert f"'{name or 'jit'}'" in str(caught.value)
    assert str(hvd.size() - 1) in str(caught.value)


@pytest.mark.parametrize("operation", [hvd.allgather, hvd.alltoall])
def test_rows_that_differ(operation):
    rows = hvd.size() * (1 + is_last())
    with pytest.raises(Failed, match=r"farandole\.MismatchError: .* 'rows': .* bring equal shapes"):
        run(lambda x: operation(x, name="rows"), jnp.ones((rows, 2)))


@pytest.mark.parametrize("operation", [hvd.allreduce, hvd.reducescatter, hvd.alltoall])
def test_an_array_that_was_donated_on_one_rank(operation):
    x = jnp.ones((hvd.size(), 2))
    if is_last():
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(ValueError, match="donated"):
        operation(x, name="given away")


def test_a_wrong_argument_on_one_rank_while_it_traces():
    def program(x):
        return hvd.allreduce(x, op=17 if is_last() else hvd.Sum)

    with pytest.raises(ValueError if is_last() else Failed, match="op is 17"):
        run(program, jnp.ones(3))
    with pytest.raises(
        ValueError if is_last() else Failed, match=r"broadcast 'named': root_rank is 99"
    ):
        run(lambda x: hvd.broadcast(x, 99 if is_last() else 0, name="named"), jnp.ones(3))


def test_a_dtype_or_shape_that_one_rank_can_not_send():
    wrong = TypeError if is_last() else Failed
    with pytest.raises(wrong, match="int4 cannot be sent"):
        run(lambda x: hvd.allreduce(x.astype(jnp.int4) if is_last() else x), jnp.ones(4))
    with pytest.raises(ValueError if is_last() else Failed, match="a multiple of"):
        run(lambda x: hvd.alltoall(x[is_last() :], name="odd"), jnp.ones((2 * hvd.size(), 3)))


def test_what_can_not_be_done_within_jit():
    x = jnp.ones(4)
    with pytest.raises(ValueError, match="timeout is 3, but within jit or on a GPU"):
        run(lambda x: hvd.allreduce(x, timeout=3), x)
    with pytest.raises(ValueError, match="Adasum"):
        run(lambda x: hvd.allreduce(x, op=hvd.Adasum), x)
    with pytest.raises(TypeError, match=r"traced.*farandole\.jax"):
        run(lambda x: fd.allreduce(x), x)
    with pytest.raises(ValueError, match="can't be changed in place"):
        hvd.allreduce_(x)
    with pytest.raises(ValueError, match="multiple of"):
        run(hvd.alltoall, jnp.ones(hvd.size() + 1))
    with pytest.raises(TypeError, match="int4"):
        run(lambda x: hvd.allreduce(x.astype(jnp.int4)), x)
    # JAX names the effect in its error about programs for several devices.
    assert repr(*jax.make_jaxpr(hvd.allreduce)(x).effects) == "collectives of farandole"


def test_an_error_of_many_programs_under_way():
    """The first has failed when the others run; each of them tells the same or its own error."""
    wrong = jax.jit(lambda x: hvd.allreduce(x[: 3 + is_last()], name="under way"))
    with pytest.raises(Failed, match="MismatchError"):
        jax.block_until_ready([wrong(jnp.ones(LARGE)) for _ in range(3)])


def test_farandole_s_own_classes():
    with pytest.raises(hvd.MismatchError, match=r"^ranks disagree") as caught, hvd.typed_errors():
        run(lambda x: hvd.allreduce(x[: 3 + is_last()], name="typed"), jnp.ones(9))
    assert isinstance(caught.value.__cause__, Failed)
    with pytest.raises(KeyError), hvd.typed_errors():
        raise KeyError


def test_bad_numbers_stay_bad():
    x = jnp.array([np.nan if is_last() else 1.0, np.inf, 1.0])
    found = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(x)
    assert np.isnan(found[0])
    assert np.isinf(found[1])
    assert float(found[2]) == hvd.size()
