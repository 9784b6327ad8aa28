# SPDX-License-Identifier: Apache-2.0
"""Ranks of JAX, torch, TensorFlow and NumPy in one job: calls of one name meet, whatever arrays
they bring, compiled or not."""

import importlib
import os

import numpy as np
import pytest

import farandole as fd

pytestmark = pytest.mark.ranks(4)

FRAMEWORKS = ("jax", "torch", "tensorflow", "numpy")  # by rank
LENGTHS = (1, 1000, 300_001)

# This rank's, imported before the clock of a test runs.
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
framework = importlib.import_module(FRAMEWORKS[RANK])
own = importlib.import_module(f"farandole.{FRAMEWORKS[RANK]}")


@pytest.fixture(params=["at once", "compiled"])
def within(request):
    """Runs a function of arrays as it is, or compiled where the framework does that."""
    compilers = {"jax": "jit", "tensorflow": "function"}
    found = compilers.get(framework.__name__) if request.param == "compiled" else None
    return getattr(framework, found) if found else lambda function: function


def array(x):
    make = {"jax": "device_put", "tensorflow": "constant"}.get(framework.__name__, "asarray")
    return getattr(framework, make)(x)


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "complex64"])
def test_one_allreduce(dtype, within):
    reduce = within(lambda x: own.allreduce(x, op=own.Sum, name="mixed"))
    for epoch in range(3):
        for length in LENGTHS:
            x = np.full(length, fd.rank() + epoch).astype(dtype)
            result = reduce(array(x))
            kind = type(result).__module__.split(".")[0]
            assert kind == {"jax": "jaxlib"}.get(framework.__name__, framework.__name__)
            np.testing.assert_array_equal(np.asarray(result), np.full(length, 6 + 4 * epoch, dtype))


def test_a_group_and_a_broadcast(within):
    x = [np.full(3, fd.rank(), "f4"), np.full((2, 2), 10.0 * fd.rank(), "f4")]
    mine = [array(each) for each in x]
    found = within(lambda *xs: own.grouped_allreduce(list(xs), name="group"))(*mine)
    assert [np.asarray(each).ravel()[0] for each in found] == [1.5, 15]
    for root in range(4):
        send = within(lambda x, root=root: own.broadcast(x, root, name=f"sent.{root}"))
        assert np.asarray(send(mine[0])).tolist() == [root] * 3


@pytest.mark.parametrize("wrong", range(4))
def test_one_of_them_brings_another_shape(within, wrong):
    reduce = within(lambda x: own.allreduce(x, op=own.Sum, name="mixed shapes"))
    with pytest.raises(Exception, match="mixed shapes") as caught:
        np.asarray(reduce(array(np.ones(5 + (fd.rank() == wrong), "f4"))))
    assert "MismatchError" in f"{type(caught.value)} {caught.value}"
    assert "(6,)" in str(caught.value)
