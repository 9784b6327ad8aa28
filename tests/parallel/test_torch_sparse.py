# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients without sparse_as_dense: rows are gathered, whoever has some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

import farandole.torch as hvd

ROWS, WIDTH = 7, 3


def table() -> nn.Parameter:
    return nn.Parameter(torch.zeros(ROWS, WIDTH))


def push(p: nn.Parameter, rows: Sequence[int], by: float = 1.0, sparse: bool = True) -> None:
    (embedding(torch.tensor(rows), p, sparse=sparse) * by).sum().backward()


def wanted(op: Any, rows: Sequence[Sequence[int]], by: Sequence[float]) -> Tensor:
    """The reduced gradient where rank r has pushed rows[r] by by[r]."""
    total = torch.zeros(ROWS, WIDTH)
    for own, factor in zip(rows, by, strict=True):
        for row in own:
            total[row] += factor
    return total / len(rows) if op == hvd.Average else total


def check(p: nn.Parameter, expected: Tensor, sparse: bool = True) -> None:
    assert p.grad is not None
    assert p.grad.is_sparse is sparse
    torch.testing.assert_close(p.grad.to_dense() if sparse else p.grad, expected)
    everyones = hvd.allgather(p.grad.to_dense().unsqueeze(0))
    assert all(torch.equal(x, everyones[0]) for x in everyones)


def sgd(*ps: nn.Parameter, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(list(ps), lr=1.0), **options)


def own_rows(rank: int, step: int) -> list[int]:
    """Others on each rank and in each step; rank 1 has none at first."""
    return [] if rank == 1 and step == 0 else [rank, rank, (rank + step) % ROWS, 5][step % 2 :]


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_rows_differ_by_rank_and_step(op: Any) -> None:
    p, q = table(), nn.Parameter(torch.zeros(2))
    optimizer = sgd(p, q, op=op)
    ranks = range(hvd.size())
    moved = torch.zeros(ROWS, WIDTH)
    for step in range(4):
        optimizer.zero_grad()
        rows = [own_rows(r, step) for r in ranks]
        loss = q.sum()
        if rows[hvd.rank()]:  # else without a gradient
            loss = loss + embedding(torch.tensor(rows[hvd.rank()]), p, sparse=True).sum()
        (loss * (1.0 + hvd.rank())).backward()
        optimizer.step()
        expected = wanted(op, rows, [1.0 + r for r in ranks])
        check(p, expected)
        moved -= expected
        torch.testing.assert_close(p.detach(), moved)
        mean = sum(1.0 + r for r in ranks) / (hvd.size() if op == hvd.Average else 1)
        assert q.grad.tolist() == [mean, mean]


def test_many_tables_learned_together() -> None:
    ps = [table() for _ in range(4)]
    optimizer = sgd(*ps)
    ranks = range(hvd.size())
    for step in range(2):
        optimizer.zero_grad()
        rows_of = [torch.tensor([i, hvd.rank()]) for i in range(len(ps))]
        used = [i for i in range(len(ps)) if (i + hvd.rank() + step) % 2 == 0]
        torch.stack(
            [embedding(rows_of[i], ps[i], sparse=True).sum() for i in used]
        ).sum().backward()
        for i, p in enumerate(ps):
            rows = [[i, r] if (i + r + step) % 2 == 0 else [] for r in ranks]
            if any(rows):
                check(p, wanted(hvd.Average, rows, [1.0] * len(rows)))
            else:
                assert p.grad is None


@pytest.mark.ranks(2, 3, 4)
def test_dense_on_some_ranks() -> None:
    """Nobody's part is lost, whatever has come first."""
    p = table()
    optimizer = sgd(p, op=hvd.Sum)
    ranks = range(hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        dense = hvd.rank() == step % hvd.size()
        push(p, [hvd.rank(), 6], 1.0 + hvd.rank(), sparse=not dense)
        optimizer.step()
        expected = wanted(hvd.Sum, [[r, 6] for r in ranks], [1.0 + r for r in ranks])
        torch.testing.assert_close(p.grad.to_dense(), expected)


@pytest.mark.parametrize("dense", [True, False], ids=["as_dense", "rows"])
def test_sparse_after_dense(dense: bool) -> None:
    """A parameter whose gradients were dense at first, as in a tied head."""
    p = table()
    optimizer = sgd(p, sparse_as_dense=dense)
    own = [[rank, 5] for rank in range(hvd.size())]
    by = [1.0 + rank for rank in range(hvd.size())]
    for sparse in (False, False, True, False, True):
        optimizer.zero_grad()
        push(p, own[hvd.rank()], by[hvd.rank()], sparse)
        assert p.grad is not None
        assert p.grad.is_sparse or not sparse
        check(p, wanted(hvd.Average, own, by), p.grad.is_sparse)
        optimizer.step()


def test_accumulation_goes_on_from_the_reduced_gradient() -> None:
    p = table()
    optimizer = sgd(p)
    expected = torch.zeros(ROWS, WIDTH)
    for step in range(3):
        push(p, [hvd.rank(), step])
        rows = [[r, step] for r in range(hvd.size())]
        expected += wanted(hvd.Average, rows, [1.0] * hvd.size())
        check(p, expected)
        optimizer.step()


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_several_backward_passes(passes: int) -> None:
    """And one more, which step() reduces."""
    p = table()
    optimizer = sgd(p, backward_passes_per_step=passes)
    ranks = range(hvd.size())
    for _ in range(3):
        optimizer.zero_grad()
        for turn in range(passes):
            push(p, [hvd.rank(), turn])
        with optimizer.no_sync():
            push(p, [hvd.rank(), passes])
        optimizer.step()
        rows = [[r, *range(passes + 1), *([r] * passes)] for r in ranks]
        check(p, wanted(hvd.Average, rows, [1.0] * len(rows)))


def test_predivided() -> None:
    p, q = table(), nn.Parameter(torch.zeros(WIDTH))
    optimizer = sgd(p, q, gradient_predivide_factor=2.0)
    for step in range(3):
        optimizer.zero_grad()
        ((embedding(torch.tensor([hvd.rank(), step]), p, sparse=True) + q).sum()).backward()
        optimizer.step()
        check(p, wanted(hvd.Average, [[r, step] for r in range(hvd.size())], [1.0] * hvd.size()))
        assert q.grad.tolist() == [2.0] * WIDTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_shapes_and_dtypes(dtype: torch.dtype) -> None:
    """Two sparse dimensions and none that is dense."""
    p = nn.Parameter(torch.zeros(4, 5, dtype=dtype))
    optimizer = sgd(p, op=hvd.Sum)
    for step in range(2):
        optimizer.zero_grad()
        at = torch.tensor([[hvd.rank() % 4, step], [1, 3]])
        p.grad = torch.sparse_coo_tensor(
            at, torch.tensor([1.0, 2.0], dtype=dtype), p.shape, check_invariants=True
        )
        optimizer.step()
        expected = torch.zeros(4, 5, dtype=dtype)
        for r in range(hvd.size()):
            expected[r % 4, 1] += 1.0
            expected[step, 3] += 2.0
        torch.testing.assert_close(p.grad.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_without_elements(dtype: torch.dtype) -> None:
    """An embedding of dimension 0."""
    p, q = nn.Parameter(torch.zeros(4, 0, dtype=dtype)), nn.Parameter(torch.zeros(2))
    optimizer = sgd(p, q)
    for step in range(2):
        optimizer.zero_grad()
        rows = embedding(torch.tensor([hvd.rank(), step]), p, sparse=True)
        (rows.sum() + (q * (1.0 + hvd.rank())).sum()).backward()
        assert p.grad is not None
        assert p.grad.is_sparse
        assert p.grad.shape == (4, 0)
    assert q.grad is not None
    assert q.grad.tolist() == [(1.0 + hvd.size()) / 2] * 2


@pytest.mark.ranks(3, 4)
def test_a_process_set() -> None:
    process_set = hvd.add_process_set([0, hvd.size() - 1])
    p = table()
    optimizer = sgd(p, process_set=process_set)
    members = process_set.ranks
    push(p, [hvd.rank()])
    optimizer.step()
    mine = hvd.rank() in members
    rows = [[r] for r in members] if mine else [[hvd.rank()]]
    torch.testing.assert_close(p.grad.to_dense(), wanted(hvd.Average, rows, [1.0] * len(rows)))
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


@pytest.mark.ranks(2, 4)
def test_only_sums_and_averages() -> None:
    p = table()
    optimizer = sgd(p, op=hvd.Max)
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        push(p, [1])
    assert not optimizer.state


@pytest.mark.ranks(2, 3)
def test_shapes_that_differ() -> None:
    """An index of one rank may lie far beyond the tensor of another: nothing is built of it."""
    longest = 1 << 24
    rows = longest if hvd.rank() == 1 else 3
    x = torch.sparse_coo_tensor([[rows - 1]], [1.0], (rows,), check_invariants=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'unlike'.*different shapes.*16777216"):
            hvd.sparse_allreduce_async(x, "unlike", hvd.Sum)()
    flat = x if hvd.rank() == 1 else torch.ones(3, 3).to_sparse()
    with pytest.raises((hvd.MismatchError, ValueError), match="unlike"):
        hvd.sparse_allreduce_async(flat, "unlike", hvd.Sum)()
    y = torch.sparse_coo_tensor([[hvd.rank()]], [1.0], (hvd.size(),), check_invariants=True)
    total = hvd.sparse_allreduce_async(y, "alike", hvd.Sum)()
    assert total.to_dense().tolist() == [1.0] * hvd.size()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("row", [ROWS, -1, 1 << 42])
def test_an_index_outside_of_the_tensor_is_never_written_to(row: int) -> None:
    """Bytes that somebody has changed between two hosts look the same."""
    place = row if hvd.rank() == 1 else 2
    x = torch.sparse_coo_tensor([[place]], [[1.0] * WIDTH], (ROWS, WIDTH), check_invariants=False)
    with pytest.raises(
        hvd.PeerError, match=rf"'?astray'?.*outside of the shape \({ROWS}, {WIDTH}\)"
    ):
        hvd.sparse_allreduce_async(x, "astray", hvd.Sum)()
    p = table()
    optimizer = sgd(p)
    p.grad = x
    with pytest.raises(hvd.PeerError, match=r"outside of the shape"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.zeros(ROWS, WIDTH))
