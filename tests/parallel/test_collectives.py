# SPDX-License-Identifier: Apache-2.0
"""One table of collective x dtype x op x shape, against NumPy on all ranks' data."""

import functools
import socket
from itertools import product

import numpy as np
import pytest

import farandole as fd
from harness.arrays import (
    DTYPES,
    FLOATS,
    OPS,
    assert_same,
    data,
    has_op,
    is_exact,
    reduced,
    rows_of,
    shapes,
)

REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if has_op(dtype, op)]


@functools.lru_cache(maxsize=8)  # the next op of this dtype takes the same
def everyone(shape, dtype, salt=0):
    return [data(rank, shape, dtype, salt) for rank in range(fd.size())]


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_allreduce(dtype, op):
    for shape in shapes(dtype):
        inputs = everyone(shape, dtype)
        mine = inputs[fd.rank()].copy()
        result = fd.allreduce(mine, op=getattr(fd, op), name=f"allreduce.{dtype}.{op}.{shape}")
        assert_same(result, reduced(op, inputs), is_exact(dtype, op))
        assert_same(mine, inputs[fd.rank()])


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_allreduce_in_place(dtype, op):
    for shape in shapes(dtype):
        inputs = everyone(shape, dtype, salt=1)
        mine = inputs[fd.rank()].copy()
        assert fd.allreduce_(mine, op=getattr(fd, op)) is mine
        assert_same(mine, reduced(op, inputs), is_exact(dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(dtype):
    for root in range(fd.size()):
        for shape in shapes(dtype):
            inputs = everyone(shape, dtype, salt=root)
            mine = inputs[fd.rank()].copy()
            assert_same(fd.broadcast(mine, root), inputs[root])
            assert_same(mine, inputs[fd.rank()])
            assert fd.broadcast_(mine, root) is mine
            assert_same(mine, inputs[root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather(dtype):
    all_rows = [lambda r: r, lambda r: r + 1, lambda r: 1000 * (r % 2)]
    for rows, rest in product(all_rows, [(), (5,), (2, 3), (0,)]):
        inputs = [data(r, (rows(r), *rest), dtype) for r in range(fd.size())]
        assert_same(fd.allgather(inputs[fd.rank()]), np.concatenate(inputs))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
def test_large_allgather(dtype):
    inputs = [data(r, ((1 << 20) + r,), dtype) for r in range(fd.size())]
    assert_same(fd.allgather(inputs[fd.rank()]), np.concatenate(inputs))


@pytest.mark.parametrize(("dtype", "op"), [(d, op) for d, op in REDUCTIONS if op in OPS[:2]])
def test_reducescatter(dtype, op):
    for rows, rest in product([0, 1, 7, 1000], [(), (3,)]):
        inputs = everyone((rows, *rest), dtype)
        expected = reduced(op, inputs)[rows_of(fd.rank(), rows, fd.size())]
        result = fd.reducescatter(inputs[fd.rank()], op=getattr(fd, op))
        assert_same(result, expected, is_exact(dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall(dtype):
    size, rank = fd.size(), fd.rank()
    for scale, rest in product([1, 500], [(), (3,)]):
        splits = [[scale * ((sender + to) % 3) for to in range(size)] for sender in range(size)]
        inputs = [data(r, (sum(splits[r]) + 2, *rest), dtype) for r in range(size)]  # 2 rows stay
        parts = []
        for sender in range(size):
            begin = sum(splits[sender][:rank])
            parts.append(inputs[sender][begin : begin + splits[sender][rank]])
        output, received = fd.alltoall(inputs[rank], splits[rank])
        assert_same(output, np.concatenate(parts))
        assert received.tolist() == [splits[sender][rank] for sender in range(size)]


def test_alltoall_in_equal_parts():
    size, rank = fd.size(), fd.rank()
    mine = np.arange(3 * size) + 100 * rank
    expected = np.concatenate([np.arange(3 * rank, 3 * rank + 3) + 100 * r for r in range(size)])
    np.testing.assert_array_equal(fd.alltoall(mine), expected)
    output, received = fd.alltoall_async(mine).wait()
    np.testing.assert_array_equal(output, expected)
    assert received.tolist() == [3] * size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_factors_of_floats(dtype, op):
    inputs = everyone((1000,), dtype)
    for pre, post in [(0.5, 1.0), (1.0, 4.0), (0.25, 2.0)]:
        result = fd.allreduce(
            inputs[fd.rank()], op=getattr(fd, op), prescale_factor=pre, postscale_factor=post
        )
        scaled = [x * np.array(pre, dtype) for x in inputs]
        expected = reduced(op, scaled) * np.array(post, dtype)
        assert_same(result, expected, exact=op != "Average")


def test_factors_of_integers():
    inputs = everyone((1000,), "int32")
    result = fd.allreduce(inputs[fd.rank()], op=fd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    np.testing.assert_array_equal(result, reduced("Sum", inputs))


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
