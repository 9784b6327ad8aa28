# SPDX-License-Identifier: Apache-2.0
"""8-bit floats: ml_dtypes' arrays and torch's tensors, summed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from harness.arrays import Array, reduced, rows_of

ml_dtypes = pytest.importorskip("ml_dtypes")
NAMES = ["float8_e4m3fn", "float8_e5m2"]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Where torch and ml_dtypes differ: torch 2.13 makes 448 of all that is beyond.
TORCH_AGREES_TO = {"float8_e4m3fn": 464.0, "float8_e5m2": np.inf}


def codes(rank: int, shape: tuple[int, ...], name: str) -> Array:
    """A rank's numbers: of a range in which float32 holds sums of a few exactly, in any order."""
    drawn = np.random.default_rng([rank, *shape]).integers(0x20, 0x60, shape, np.uint8)
    signs = np.random.default_rng([rank, 1, *shape]).integers(0, 2, shape, np.uint8) << 7
    return np.asarray(drawn | signs).view(getattr(ml_dtypes, name))


def any_codes(rank: int, rows: int) -> Array:
    """Every code, NaN and infinity among them, from another one on for each rank."""
    return np.roll(np.resize(np.arange(256, dtype=np.uint8), (rows, 256)), rank, 1)


def rounded(wide: Any, name: str) -> Array:
    """float32 as ml_dtypes rounds it."""
    with np.errstate(all="ignore"):
        return np.asarray(wide, np.float32).astype(getattr(ml_dtypes, name))


def expected(op: str, shape: tuple[int, ...], name: str) -> Array:
    inputs = [codes(r, shape, name).astype(np.float32) for r in range(fd.size())]
    total = reduced("Sum" if op == "Average" else op, inputs)
    return rounded(total / np.float32(fd.size()) if op == "Average" else total, name)


def assert_codes(actual: Any, wanted: Array) -> None:
    """The same bits, NaN of any kind."""
    if isinstance(actual, torch.Tensor):
        assert str(actual.dtype) == f"torch.{wanted.dtype.name}"
        actual = actual.view(torch.uint8).numpy().view(wanted.dtype)
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    got, right = actual.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_array_equal(got, right)
    np.testing.assert_array_equal(np.signbit(got[right == 0]), np.signbit(right[right == 0]))


def as_tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, x.dtype.name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max"])
def test_allreduce(name: str, op: str) -> None:
    for shape in [(), (1,), (7,), (3, 5), (0, 2), (1000,), *[((1 << 20) + 3,)] * (op == "Sum")]:
        mine, right = codes(fd.rank(), shape, name), expected(op, shape, name)
        assert_codes(fd.allreduce(mine, op=getattr(fd, op)), right)
        assert_codes(hvd.allreduce(as_tensor(mine), op=getattr(fd, op)), right)
        assert_codes(mine, codes(fd.rank(), shape, name))
        assert fd.allreduce_(mine, op=getattr(fd, op)) is mine
        assert_codes(mine, right)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_rounded_as_by_ml_dtypes_and_torch(name: str) -> None:
    """Code k of every rank times a factor, and their average: float32 of all sizes."""
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))
    wide = every.astype(np.float32)
    factors = np.exp2(np.random.default_rng(3).uniform(-20, 12, 60)).astype(np.float32)
    for factor in [np.float32(1), *factors]:
        got = fd.allreduce(every, op=fd.Average, postscale_factor=float(factor))
        with np.errstate(all="ignore"):  # the sum of 2^16 and its like is exact in float32
            exact = wide * np.float32(fd.size()) * factor / np.float32(fd.size())
        assert_codes(got, rounded(exact, name))
        agree = np.abs(exact) <= TORCH_AGREES_TO[name]
        theirs = torch.from_numpy(exact).to(getattr(torch, name)).float().numpy()
        np.testing.assert_array_equal(got.astype(np.float32)[agree], theirs[agree])


def test_what_is_too_large() -> None:
    for name, beyond in zip(NAMES, (np.nan, np.inf), strict=True):
        largest = rounded(np.full(5, LARGEST[name]), name)
        mean = fd.allreduce(largest, op=fd.Average)
        assert_codes(mean, largest)
        total = fd.allreduce(-largest, op=fd.Sum, postscale_factor=2.0).astype(np.float32)
        np.testing.assert_array_equal(total, np.full(5, -beyond, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_product(name: str) -> None:
    mine = rounded([2.0, -1.0, 0.5, 0.0, fd.rank() + 1.0], name)
    n = fd.size()
    right = [2.0**n, (-1.0) ** n, 0.5**n, 0.0, float(np.prod(np.arange(1, n + 1)))]
    assert_codes(fd.allreduce(mine, op=fd.Product), rounded(right, name))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_moved_as_they_are(name: str) -> None:
    size, rank = fd.size(), fd.rank()
    dtype = getattr(ml_dtypes, name)
    inputs = [any_codes(r, size).view(dtype) for r in range(size)]
    for mine in (inputs[rank], as_tensor(inputs[rank])):
        results = {
            "allgather": fd.allgather(mine),
            "broadcast": fd.broadcast(mine, size - 1),
            "alltoall": fd.alltoall(mine),
        }
        wanted = {
            "allgather": np.concatenate(inputs),
            "broadcast": inputs[-1],
            "alltoall": np.stack([x[rank] for x in inputs]),
        }
        for call, result in results.items():
            raw = result.view(torch.uint8).numpy() if mine is not inputs[rank] else result
            assert np.array_equal(raw.view(np.uint8), wanted[call].view(np.uint8)), call


@pytest.mark.parametrize("name", NAMES)
def test_reducescatter(name: str) -> None:
    for rows in (1, 7, 500):
        right = expected("Sum", (rows, 3), name)[rows_of(fd.rank(), rows, fd.size())]
        mine = codes(fd.rank(), (rows, 3), name)
        assert_codes(fd.reducescatter(mine, op=fd.Sum), right)
        assert_codes(hvd.reducescatter(as_tensor(mine), op=hvd.Sum), right)


@pytest.mark.ranks(2, 4)
def test_the_two_are_not_the_same() -> None:
    name = NAMES[fd.rank() == fd.size() - 1]
    with pytest.raises(fd.MismatchError, match=r"dtype is float8_e4m3fn on.*float8_e5m2 on"):
        fd.allreduce(codes(fd.rank(), (3,), name), name="mixed")


def test_adasum_takes_larger_floats_only() -> None:
    with pytest.raises(TypeError, match=r"float8_e5m2.*Adasum takes floats"):
        fd.allreduce(codes(fd.rank(), (3,), "float8_e5m2"), op=fd.Adasum)
