# SPDX-License-Identifier: Apache-2.0
"""The torch calls: signatures, kinds of handles, and gradients."""

from __future__ import annotations

import pytest
import torch

import farandole.torch as hvd
from harness.ranks import last
from harness.toys import everyone, own

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


# ---- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_dtypes(dtype: torch.dtype) -> None:
    x = torch.full((3, 5), 12 * (1 + hvd.rank())).to(dtype)
    total = sum(12 * (1 + r) for r in range(hvd.size()))
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.full((3, 5), total).to(dtype))
    result = hvd.allreduce(x)
    assert result.dtype is dtype
    assert torch.equal(result, torch.full((3, 5), total // hvd.size()).to(dtype))
    assert hvd.allreduce_(x, op=hvd.Max) is x
    assert torch.equal(x, torch.full((3, 5), 12 * hvd.size()).to(dtype))


def test_average_is_deprecated() -> None:
    x = torch.ones(2)
    with pytest.deprecated_call() as told:
        assert hvd.allreduce(x, average=False).tolist() == [hvd.size()] * 2
    assert told[0].filename == __file__  # the user's line
    with pytest.deprecated_call() as told:
        hvd.grouped_allreduce_([x.clone()], average=True)
    assert told[0].filename == __file__
    with pytest.deprecated_call():
        assert hvd.allreduce(x, True).tolist() == [1.0] * 2
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(x, average=True, op=hvd.Sum)


def test_handles() -> None:
    x = own()
    handles = [
        hvd.allreduce_async(x, name="a", op=hvd.Sum),
        hvd.allgather_async(x, name="b"),
        hvd.broadcast_async(x, 0, name="c"),
        hvd.grouped_allreduce_async([x, x], name="d", op=hvd.Max),
    ]
    total, rows, root, pair = [hvd.synchronize(h) for h in reversed(handles)][::-1]
    assert all(hvd.poll(h) for h in handles)
    assert torch.equal(total, everyone().sum(0))
    assert torch.equal(rows, everyone().flatten(0, 1))
    assert torch.equal(root, own(0))
    assert torch.equal(pair[1], everyone().amax(0))
    assert hvd.synchronize(handles[0]) is total


def test_alltoall_and_received_splits() -> None:
    n, rank = hvd.size(), hvd.rank()
    x = torch.arange(float(n * (rank + 1))).view(-1, 1) + 100 * rank
    splits = torch.full((n,), rank + 1, dtype=torch.int32)
    output, received = hvd.alltoall(x, splits)
    assert received.dtype is torch.int32
    assert received.tolist() == [r + 1 for r in range(n)]
    expected = [100 * r + rank * (r + 1) + i for r in range(n) for i in range(r + 1)]
    assert output.flatten().tolist() == expected
    assert hvd.alltoall(torch.full((n, 2), float(rank))).tolist() == [[r, r] for r in range(n)]
    both = hvd.synchronize(hvd.alltoall_async(torch.full((n, 2), float(rank))))
    assert both[1].tolist() == [1] * n


def test_received_splits_beyond_int32() -> None:
    """Of rows without elements, so that no memory is needed."""
    rows = [2**31 + 8 if rank == last() else 3 + rank for rank in range(hvd.size())]
    mine = torch.empty(rows[hvd.rank()] * hvd.size(), 0, requires_grad=True)
    output, received = hvd.alltoall(mine, splits=[rows[hvd.rank()]] * hvd.size())
    assert received.tolist() == rows
    assert received.dtype is torch.int64
    output.sum().backward()
    assert mine.grad is not None
    assert mine.grad.shape == mine.shape


def test_reducescatter_gives_more_rows_to_low_ranks() -> None:
    n, rank = hvd.size(), hvd.rank()
    rows = n + 1  # one row more on rank 0
    x = own(shape=(rows, 2))
    result = hvd.reducescatter(x, op=hvd.Sum)
    begin = 0 if rank == 0 else rank + 1
    expected = everyone((rows, 2)).sum(0)[begin : begin + (2 if rank == 0 else 1)]
    assert torch.equal(result, expected)
    pair = hvd.grouped_reducescatter([x, x.float()], prescale_factor=0.5)
    assert torch.equal(pair[1], (expected / (2 * n)).float())


def test_compression_of_single_calls() -> None:
    x = torch.full((3,), 1 / 3) * (1 + hvd.rank())
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        y = hvd.allreduce(x, compression=compression)
        assert y.dtype is torch.float32
        torch.testing.assert_close(y, hvd.allreduce(x), rtol=1e-2, atol=0)
        (z,) = hvd.grouped_allreduce([x], compression=compression)
        assert torch.equal(y, z)
    assert hvd.allreduce(torch.ones(2, dtype=torch.int32), compression=hvd.Compression.fp16)[0] == 1


def test_sparse_allreduce() -> None:
    rank = hvd.rank()
    rows = [] if rank == 1 else [rank, rank, 4]  # rank 1 has none; duplicates are added up
    x = torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64),
        torch.ones(len(rows), 2) * (1 + rank),
        (5, 2),
        check_invariants=True,
    )
    start = hvd.sparse_allreduce_async
    result = start(x, "sparse", hvd.Average)()
    dense = hvd.allreduce(x.to_dense(), op=hvd.Average)
    torch.testing.assert_close(result.to_dense(), dense)
    assert result.is_coalesced()
    with pytest.raises(ValueError, match="sparse COO"):
        hvd.sparse_allreduce_async(x.to_dense(), "dense", hvd.Sum)
