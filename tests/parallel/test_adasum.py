# SPDX-License-Identifier: Apache-2.0
"""Adasum against the definition, worked out in float64 on all ranks' tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from farandole.adasum import coefficients
from harness.adasum import assert_near, expected, reference, tensor


@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (0,), (100_003,)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_equals_the_definition(dtype: str, shape: tuple[int, ...]) -> None:
    x = tensor(fd.rank(), shape, dtype)
    before = x.copy()
    result = fd.allreduce(x, op=fd.Adasum, name=f"{dtype} {shape}")
    assert result.dtype == x.dtype
    assert result.shape == shape
    np.testing.assert_array_equal(x, before)
    assert_near(result, expected(shape, dtype), dtype)
    for theirs in fd.allgather_object(result.tobytes()):
        assert theirs == result.tobytes()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch(dtype: str, in_place: bool) -> None:
    kind = getattr(torch, dtype)
    inputs = [torch.from_numpy(tensor(r, (33, 3))).to(kind) for r in range(hvd.size())]
    wanted = reference([x.double().numpy() for x in inputs])
    x = inputs[hvd.rank()]
    result = (hvd.allreduce_ if in_place else hvd.allreduce)(x, op=hvd.Adasum)
    assert result.dtype is kind
    assert (result.data_ptr() == x.data_ptr()) == in_place
    assert_near(result.double().numpy(), wanted, dtype)


def test_a_strided_tensor() -> None:
    x = tensor(fd.rank(), (6, 8))
    result = fd.allreduce(x.T, op=fd.Adasum)
    assert_near(result, expected((6, 8)).T)


def test_parallel_vectors_are_averaged_and_orthogonal_ones_summed() -> None:
    same = fd.allreduce(np.full(5, 3.0), op=fd.Adasum)
    np.testing.assert_allclose(same, 3.0, rtol=1e-15)
    mine = np.zeros(4)
    mine[fd.rank()] = 2.0
    np.testing.assert_array_equal(
        fd.allreduce(mine, op=fd.Adasum), np.where(np.arange(4) < fd.size(), 2.0, 0.0)
    )


def test_zeros_change_nothing_and_opposites_cancel() -> None:
    last = fd.size() - 1
    x = np.arange(1.0, 6.0) if fd.rank() == last else np.zeros(5)
    np.testing.assert_array_equal(fd.allreduce(x, op=fd.Adasum), np.arange(1.0, 6.0))
    assert not fd.allreduce(np.zeros(3), op=fd.Adasum).any()
    sign = 0.0 if fd.rank() > 1 else 1.0 - 2.0 * fd.rank()
    rest = fd.allreduce(sign * np.full(9, 0.1), op=fd.Adasum)
    assert rest.tolist() == ([0.1] * 9 if fd.size() == 1 else [0.0] * 9)


def test_a_scaled_group() -> None:
    shapes = [(4,), (2, 3), (1,)]
    mine = [tensor(fd.rank(), shape, salt=i) for i, shape in enumerate(shapes)]
    factors: dict[str, Any] = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for name in ("group", None):
        results = fd.grouped_allreduce(iter(mine), op=fd.Adasum, name=name, **factors)
        for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            assert_near(result / 1.5, expected(shape, salt=i))


def test_handles_may_be_waited_for_in_any_order() -> None:
    handles = {}
    order = range(6) if fd.rank() % 2 else range(5, -1, -1)
    for i in order:
        handles[i] = fd.allreduce_async(
            tensor(fd.rank(), (50,), salt=i), op=fd.Adasum, name=f"any order {i}"
        )
    for i in reversed(order):
        assert_near(handles[i].wait(), expected((50,), salt=i))
        assert handles[i].poll()


@pytest.mark.ranks(2, 3, 4)
def test_process_sets() -> None:
    members = list(range(1, fd.size()))
    process_set = fd.add_process_set(members)
    if process_set.included():
        x = tensor(fd.rank(), (11,))
        wanted = reference([tensor(r, (11,)) for r in members])
        assert_near(fd.allreduce(x, op=fd.Adasum, process_set=process_set), wanted)
    fd.barrier()
    assert fd.remove_process_set(process_set)


@pytest.mark.ranks(2, 4)
def test_ranks_must_agree() -> None:
    x = np.ones(3 + (fd.rank() == 0))
    with pytest.raises(fd.MismatchError, match=r"'shapes'.*shape is \(4,\) on rank 0"):
        fd.allreduce(x, op=fd.Adasum, name="shapes")
    for name in ("operations", None):
        with pytest.raises(fd.MismatchError, match="Adasum"):
            fd.allreduce(np.ones(3), op=fd.Sum if fd.rank() else fd.Adasum, name=name)
    with pytest.raises(fd.MismatchError, match="prescale"):
        fd.allreduce(np.ones(3), op=fd.Adasum, name="factor", prescale_factor=1.0 + fd.rank())
    assert fd.allreduce(np.ones(3), op=fd.Adasum, name="after").tolist() == [1.0] * 3


def test_integers_are_refused_on_all_ranks() -> None:
    last = fd.rank() == fd.size() - 1
    with pytest.raises((TypeError, ValueError), match="int32"):  # as the refusing rank, its peers
        fd.allreduce(np.ones(3, np.int32 if last else np.float32), op=fd.Adasum, name="integers")
    assert fd.allreduce(np.ones(3), op=fd.Adasum).tolist() == [1.0] * 3


@pytest.mark.ranks(2, 3)
def test_a_joined_rank_is_refused() -> None:
    if fd.rank() == 0:
        fd.join()
    else:
        with pytest.raises(fd.FarandoleError, match="joined"):
            fd.allreduce(np.ones(3), op=fd.Adasum, name="without rank 0")
        fd.join()
    assert fd.allreduce(np.ones(3), op=fd.Adasum).tolist() == [1.0] * 3


def test_not_a_number_reaches_every_rank() -> None:
    x = np.full(3, np.nan if fd.rank() == 0 else 1.0)
    assert np.isnan(fd.allreduce(x, op=fd.Adasum)).all()


@pytest.mark.parametrize("members", range(1, 18))
def test_any_number_of_ranks(members: int) -> None:
    inputs = [tensor(r, (40,)) for r in range(members)]
    matrix = np.stack(inputs)
    result = coefficients(matrix @ matrix.T) @ matrix
    np.testing.assert_allclose(result, reference(inputs), rtol=1e-11, atol=1e-12)
