# SPDX-License-Identifier: Apache-2.0
"""The torch calls: signatures, kinds of handles, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import farandole.torch as hvd
from harness.collectives import COMPILED, Compiled
from harness.gpu_arrays import Torch
from harness.ranks import last
from harness.toys import everyone, own

# One of each kind and size; test_torch_kind.py has all.
DTYPES = ["uint8", "int16", "int32", "float16", "float64", "complex64", "bool", "bfloat16"]


class Calls(Compiled):
    """The waiting calls of farandole.torch; nothing is compiled."""

    def __init__(self) -> None:
        super().__init__(hvd, Torch("cpu").put, torch.Tensor, lambda function: function)
        self.get = Torch("cpu").get  # type: ignore[method-assign]


# ---- values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", COMPILED, ids=lambda check: check.__name__)
def test_collective(check: Any, dtype: str) -> None:
    check(Calls(), dtype)


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


def test_received_splits() -> None:
    n, rank = hvd.size(), hvd.rank()
    splits = torch.full((n,), rank + 1, dtype=torch.int32)
    _, received = hvd.alltoall(torch.zeros(n * (rank + 1), 1), splits)
    assert received.dtype is torch.int32
    assert received.tolist() == [r + 1 for r in range(n)]
    both = hvd.synchronize(hvd.alltoall_async(torch.zeros(n, 2)))
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


def test_a_group_of_reducescatters() -> None:
    """The remaining row is rank 0's."""
    n, rank = hvd.size(), hvd.rank()
    x = own(shape=(n + 1, 2))
    pair = hvd.grouped_reducescatter([x, x.float()], prescale_factor=0.5)
    begin = 0 if rank == 0 else rank + 1
    expected = everyone((n + 1, 2)).sum(0)[begin : begin + (2 if rank == 0 else 1)] / (2 * n)
    assert [torch.equal(y, expected.to(y.dtype)) for y in pair] == [True, True]


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_allreduce_of_integers(op: Any, dtype: torch.dtype) -> None:
    """Exact, as that of dense tensors, beyond the integers of float32 and beyond the dtype."""
    highest = torch.iinfo(dtype).max // (1 if op == hvd.Average and dtype.itemsize == 1 else 8)
    x = torch.tensor([highest - 3 * hvd.rank(), -7, hvd.rank(), 0]).to(dtype)
    result = hvd.sparse_allreduce_async(x.to_sparse(), "integers", op)()
    assert result.dtype is dtype
    assert torch.equal(result.to_dense(), hvd.allreduce(x, op=op))


WAITING: dict[str, Callable[..., Any]] = {
    "allreduce": hvd.allreduce,
    "allgather": hvd.allgather,
    "broadcast": partial(hvd.broadcast, root_rank=0),
    "reducescatter": hvd.reducescatter,
    "alltoall": hvd.alltoall,
    "allgather_object": hvd.allgather_object,
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("call", WAITING)
def test_every_call_that_waits_takes_a_timeout(call: str) -> None:
    """The call stays under way: the ranks that come late complete it."""
    if call == "allgather_object" and hvd.local_size() < hvd.size():
        pytest.skip("between hosts it makes two calls, and the second one needs a repeated call")
    x = torch.full((hvd.size(), 3), 1.0 + hvd.rank())
    run = partial(WAITING[call], x, name=f"late {call}")
    if hvd.rank() == 0:
        with pytest.raises(hvd.StallError, match=f"late {call}"):
            run(timeout=0.05)
        for peer in range(1, hvd.size()):
            hvd.send(torch.ones(1), peer)
    else:
        hvd.recv(torch.empty(1), 0)
        run()
    hvd.allreduce(torch.ones(1), name="go on")
