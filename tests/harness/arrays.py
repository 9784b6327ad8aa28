# SPDX-License-Identifier: Apache-2.0
"""Rank-dependent data whose reductions are exact, and what NumPy makes of all ranks' data."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = [*INTEGERS, *FLOATS, *COMPLEX, "bool"]
OPS = ["Average", "Sum", "Min", "Max", "Product"]


def has_op(dtype: str, op: str) -> bool:
    """Whether the reduction is defined: bool has no sums, complex numbers no order."""
    if dtype == "bool":
        return op in ("Min", "Max", "Product")
    return dtype not in COMPLEX or op in ("Sum", "Average")


def ops_of(dtype: str, among: list[str] = OPS) -> list[str]:
    """Those of some reductions that are defined."""
    return [op for op in among if has_op(dtype, op)]


def is_exact(dtype: str, op: str) -> bool:
    """Whether the reduction of data() has no roundings."""
    return op != "Average" or dtype not in FLOATS + COMPLEX


def shapes(dtype: str) -> list[tuple[int, ...]]:
    """0-d, one, odd, many, 2-d, none, and 3 elements more than 1 MB."""
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize  # NumPy has no such type
    million = (1 << 20) // itemsize + 3
    return [(), (1,), (7,), (1000,), (3, 5), (0,), (4, 0), (million,)]


def data(rank: int, shape: tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """Small values that differ by rank: sums and products of a few are exact in any dtype."""
    rng = np.random.default_rng([rank, salt, *shape])
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    low = 0 if dtype.startswith("u") else -3
    x = rng.integers(low, 4, size=shape)
    if dtype in COMPLEX:
        return np.asarray(x + 1j * rng.integers(-3, 4, size=shape), dtype)
    return np.asarray(x, dtype)


def reduced(op: str, inputs: list[Array]) -> Array:
    """The reduction of all ranks' arrays; integer averages are truncated towards zero."""
    stack = np.stack(inputs)
    if op in ("Min", "Max"):
        return np.asarray((np.min if op == "Min" else np.max)(stack, axis=0))
    if op == "Product":
        return np.asarray(np.prod(stack, axis=0), stack.dtype)
    kind = stack.dtype.kind
    wide = {"f": np.float64, "c": np.complex128, "u": np.int64, "i": np.int64}[kind]
    total: Any = np.sum(stack, axis=0, dtype=wide)
    if op == "Average":
        total = np.trunc(total / len(inputs)) if kind in "ui" else total / len(inputs)
    return np.asarray(total, stack.dtype)


def rows_of(rank: int, total: int, size: int) -> slice:
    """Reducescatter's rows of one rank: those left over go to the low ranks."""
    counts = [total // size + (r < total % size) for r in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def assert_same(
    actual: Any, expected: Array, exact: bool = True, of_type: float | None = None
) -> None:
    """Equal dtype, shape and values; not exact: up to two roundings.

    of_type: the roundings are those of a smaller type, with this epsilon, of each rank's value.
    """
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if exact:
        np.testing.assert_array_equal(actual, expected)
    elif of_type is None:
        # Where values cancel, roundings are left: a ring adds in another order than the ranks'.
        eps = np.finfo(expected.dtype).eps
        np.testing.assert_allclose(actual, expected, rtol=2 * eps, atol=2 * eps)
    else:
        np.testing.assert_allclose(actual, expected, rtol=2 * of_type, atol=3 * of_type)
