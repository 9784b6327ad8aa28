# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape, against NumPy on all ranks' data."""

import functools
import socket

import numpy as np
import pytest

import farandole as fd
from harness.arrays import DTYPES
from harness.collectives import CHECKS
from harness.gpu_arrays import Torch


class NumPy:
    """What the table needs of a library."""

    put, get = staticmethod(np.array), staticmethod(np.asarray)


class Mapped(NumPy):
    """In memory that all ranks map."""

    @staticmethod
    def put(x, dtype):
        made = fd.empty(x.shape, dtype)
        made[...] = x
        return made


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64", "bool"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_mapped_memory(check, dtype):
    check(Mapped(), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(check, dtype):
    check(Torch("cpu") if dtype == "bfloat16" else NumPy(), dtype)


def test_random_floats_agree_with_float64_and_between_ranks():
    inputs = [np.random.default_rng(r).normal(size=100_003).astype("f4") for r in range(fd.size())]
    result = fd.allreduce(inputs[fd.rank()], op=fd.Sum)
    np.testing.assert_allclose(result, np.sum(inputs, axis=0, dtype="f8"), rtol=1e-5, atol=1e-5)
    for theirs in fd.allgather(result[None]):
        np.testing.assert_array_equal(theirs.view("u4"), result.view("u4"))


def test_sums_are_taken_in_rank_order_and_then_in_host_order():
    inputs = [np.random.default_rng(r).normal(size=10_007).astype("f4") for r in range(fd.size())]
    hosts = fd.allgather_object(socket.gethostname())
    of_hosts = [
        functools.reduce(np.add, [x for x, host in zip(inputs, hosts, strict=True) if host == name])
        for name in dict.fromkeys(hosts)
    ]
    expected = functools.reduce(np.add, of_hosts)
    result = fd.allreduce(inputs[fd.rank()], op=fd.Sum)
    np.testing.assert_array_equal(result.view("u4"), expected.view("u4"))


def test_wrapping_sum():
    result = fd.allreduce(np.full(5, 200, "u1"), op=fd.Sum)
    assert result.tolist() == [200 * fd.size() % 256] * 5


def test_barrier_holds_until_the_last():
    for _ in range(20):
        fd.barrier()
