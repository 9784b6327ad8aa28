# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over the backend `farandole`: its collectives against a model in NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import farandole.torch  # noqa: F401 (registers the backend)
from farandole import MismatchError
from harness.c10d import backend  # noqa: F401 (a fixture of all tests)

pytestmark = [
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.filterwarnings(
        "ignore:.*is deprecated:FutureWarning"
    ),  # names of torch before 2.13
]
Array = np.ndarray[Any, Any]
SHAPE = (4, 3)


def data(rank: int, dtype: torch.dtype, part: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Small integers other than 0, so that every dtype holds all results exactly."""
    values = np.random.default_rng((rank, part)).integers(1, 4, shape)
    return torch.from_numpy(values).to(dtype)


def model(x: Tensor) -> Array:
    return x.to(torch.float64).numpy()


class Case:
    """What one rank calls: `run(x, n, rank, go)` gives outputs; `want(xs, n, rank)` the model's.

    `go(function, *args)` calls it, at once or asynchronously. x: this rank's input, xs: all.
    """

    def __init__(self, name: str, run: Any, want: Any, integers: bool = False) -> None:
        self.name, self.run, self.want, self.integers = name, run, want, integers


def reduction(op: Any, combine: Callable[[Array], Array], integers: bool = False) -> list[Case]:
    """all_reduce, reduce and reduce_scatter with one op; `combine` reduces the first axis."""
    name = str(op).rsplit(".", 1)[-1].lower()

    def all_reduce(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
        go(dist.all_reduce, x, op)
        return [x]

    def reduce(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
        go(dist.reduce, x, n - 1, op)
        return [x]

    def whole(xs: list[Array], n: int, rank: int) -> list[Array]:
        return [combine(np.stack(xs))]

    def to_root(xs: list[Array], n: int, rank: int) -> list[Array]:
        return whole(xs, n, rank) if rank == n - 1 else [xs[rank]]

    return [
        Case(f"all_reduce.{name}", all_reduce, whole, integers),
        Case(f"reduce.{name}", reduce, to_root, integers),
    ]


def of_ranks(n: int, x: Tensor) -> list[Tensor]:
    """A part for each rank, that differ."""
    return [x + i for i in range(n)]


def _broadcast(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    go(dist.broadcast, x, n - 1)
    return [x]


def _all_gather(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(n)]
    go(dist.all_gather, outs, x)
    return outs


def _all_gather_into(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = x.new_zeros((n * len(x), *x.shape[1:]))
    go(dist.all_gather_into_tensor, out, x)
    return list(out.split(len(x)))


def _all_gather_in_place(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = x.new_zeros((n, *x.shape))
    out[rank] = x
    go(dist.all_gather_into_tensor, out, out[rank])
    return list(out)


def _gather(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(n)] if rank == n - 1 else None
    go(dist.gather, x, outs, n - 1)
    return outs or []


def _scatter(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = torch.zeros_like(x)
    go(dist.scatter, out, of_ranks(n, x) if rank == n - 1 else None, n - 1)
    return [out]


def _reduce_scatter(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = torch.zeros_like(x)
    go(dist.reduce_scatter, out, of_ranks(n, x))
    return [out]


def _reduce_scatter_max(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = torch.zeros_like(x)
    go(dist.reduce_scatter_tensor, out, torch.cat(of_ranks(n, x)), ReduceOp.MAX)
    return [out]


def _all_to_all(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    outs = [torch.zeros_like(x) for _ in range(n)]
    go(dist.all_to_all, outs, of_ranks(n, x))
    return outs


def _all_to_all_single(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    out = x.new_zeros((n * len(x), *x.shape[1:]))
    go(dist.all_to_all_single, out, torch.cat(of_ranks(n, x)))
    return list(out.split(len(x)))


def _all_to_all_splits(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    """Rank r sends the first i rows to rank i, so rank 0 gets none."""
    own = torch.cat([x[:i] for i in range(n)])
    out = x.new_zeros((n * rank, *x.shape[1:]))
    go(dist.all_to_all_single, out, own, [rank] * n, list(range(n)))
    return list(out.split([rank] * n))


def _all_to_all_ragged(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    outs = [x.new_zeros((rank, *x.shape[1:])) for _ in range(n)]
    go(dist.all_to_all, outs, [x[:i] for i in range(n)])
    return outs


def _barrier(x: Tensor, n: int, rank: int, go: Any) -> list[Tensor]:
    go(dist.barrier)
    return []


CASES = [
    *reduction(ReduceOp.SUM, lambda xs: xs.sum(0)),
    *reduction(ReduceOp.MIN, lambda xs: xs.min(0)),
    *reduction(ReduceOp.MAX, lambda xs: xs.max(0)),
    *reduction(ReduceOp.PRODUCT, lambda xs: xs.prod(0)),
    *reduction(ReduceOp.BAND, lambda xs: np.bitwise_and.reduce(xs.astype(int)), True),
    *reduction(ReduceOp.BOR, lambda xs: np.bitwise_or.reduce(xs.astype(int)), True),
    *reduction(ReduceOp.BXOR, lambda xs: np.bitwise_xor.reduce(xs.astype(int)), True),
    Case("broadcast", _broadcast, lambda xs, n, r: [xs[n - 1]]),
    Case("all_gather", _all_gather, lambda xs, n, r: xs),
    Case("all_gather_into_tensor", _all_gather_into, lambda xs, n, r: xs),
    Case("all_gather_in_place", _all_gather_in_place, lambda xs, n, r: xs),
    Case("gather", _gather, lambda xs, n, r: xs if r == n - 1 else []),
    Case("scatter", _scatter, lambda xs, n, r: [xs[n - 1] + r]),
    Case("reduce_scatter", _reduce_scatter, lambda xs, n, r: [sum(xs) + n * r]),
    Case("reduce_scatter.max", _reduce_scatter_max, lambda xs, n, r: [np.max(xs, 0) + r]),
    Case("all_to_all", _all_to_all, lambda xs, n, r: [x + r for x in xs]),
    Case("all_to_all_single", _all_to_all_single, lambda xs, n, r: [x + r for x in xs]),
    Case("all_to_all_single.splits", _all_to_all_splits, lambda xs, n, r: [x[:r] for x in xs]),
    Case("all_to_all.ragged", _all_to_all_ragged, lambda xs, n, r: [x[:r] for x in xs]),
    Case("barrier", _barrier, lambda xs, n, r: []),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def at_once(function: Any, *args: Any) -> None:
    assert function(*args) is None


def later(function: Any, *args: Any) -> None:
    work = function(*args, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def by_future(function: Any, *args: Any) -> None:
    function(*args, async_op=True).get_future().wait()


def by_polling(function: Any, *args: Any) -> None:
    work = function(*args, async_op=True)
    while not work.is_completed():
        time.sleep(0)  # lets other threads of this process run


@pytest.mark.parametrize("go", [at_once, later, by_future, by_polling], ids=lambda go: go.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collective(case: Case, go: Any) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        if case.integers and dtype.is_floating_point:
            continue
        for turn in (lambda x: x, lambda x: x.t().contiguous().t()):  # in order, and strided
            xs = [data(r, dtype) for r in range(n)]
            found = case.run(turn(xs[rank].clone()), n, rank, go)
            wanted = case.want([model(x) for x in xs], n, rank)
            assert len(found) == len(wanted)
            for x, y in zip(found, wanted, strict=True):
                assert x.dtype is dtype
                np.testing.assert_array_equal(model(x), y)


def test_averages_and_factors() -> None:
    """Again and again, one after the other: the second call of a kind is prepared."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = data(rank, torch.float64)
    total = np.sum([model(data(r, torch.float64)) for r in range(n)], 0)
    for factor in (0.5, 0.25, 0.5):
        mean, scaled, whole = x.clone(), x.clone(), x.clone()
        dist.all_reduce(mean, ReduceOp.AVG)
        np.testing.assert_allclose(mean, total / n, rtol=1e-15)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(factor))  # type: ignore[attr-defined]
        np.testing.assert_array_equal(scaled, total * factor)
        dist.all_reduce(whole)
        np.testing.assert_array_equal(whole, total)
    out = torch.zeros(2, dtype=torch.float64)
    whole = torch.arange(2 * n, dtype=torch.float64) + rank
    dist.reduce_scatter_tensor(out, whole, ReduceOp.AVG)
    np.testing.assert_allclose(out, np.arange(2 * n)[2 * rank :][:2] + (n - 1) / 2, rtol=1e-15)


def test_sums_of_bool() -> None:
    """True if any rank has True, as with torch's backends."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(2):  # the second call is prepared
        x = torch.tensor([False, False, rank == n - 1, True])
        dist.all_reduce(x)
        assert x.tolist() == [False, False, True, True]
    own = torch.arange(2 * n) == 2 * rank + 1
    out = torch.zeros(2, dtype=torch.bool)
    dist.reduce_scatter_tensor(out, own)
    assert out.tolist() == [False, True]


def test_repetitions_that_differ_by_rank() -> None:
    """Some ranks repeat a call, and others make it in a form that they have not used before."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2 * n):
        x = torch.full((5, 7), float(rank + step))
        if step % n == rank:
            x = x.t().contiguous().t()
        dist.all_reduce(x)
        np.testing.assert_array_equal(x, n * step + n * (n - 1) / 2)


def test_a_repetition_in_another_shape_on_one_rank() -> None:
    rank, group = dist.get_rank(), dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    with pytest.raises(MismatchError, match="shape"):
        dist.all_reduce(torch.ones(4 + (rank == 1)), group=group)
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    np.testing.assert_array_equal(x, dist.get_world_size())
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group"):
        dist.all_reduce(x, group=group)


def test_coalesced() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(3,), (2, 2), (0,), ()]
    xs = [data(rank, torch.float32, k, shape) for k, shape in enumerate(shapes)]
    group: Any = dist.group.WORLD
    everyone = [
        [data(r, torch.float32, k, shape) for r in range(n)] for k, shape in enumerate(shapes)
    ]
    with dist.distributed_c10d._coalescing_manager(group):
        for x in xs:
            dist.all_reduce(x)
    for x, all_of_it in zip(xs, everyone, strict=True):
        torch.testing.assert_close(x, torch.stack(all_of_it).sum(0), rtol=0, atol=0)
    xs = [data(rank, torch.float32, k, shape) for k, shape in enumerate(shapes)]
    wholes = [torch.zeros((n, *shape)) for shape in shapes]
    group.allgather_into_tensor_coalesced(wholes, xs).wait()
    for whole, all_of_it in zip(wholes, everyone, strict=True):
        torch.testing.assert_close(whole, torch.stack(all_of_it), rtol=0, atol=0)
    parts = [torch.zeros(shape) for shape in shapes]
    group.reduce_scatter_tensor_coalesced(parts, [whole * (rank + 1) for whole in wholes]).wait()
    for part, all_of_it in zip(parts, everyone, strict=True):
        wanted = all_of_it[rank] * sum(range(1, n + 1))
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)
    lists = [[torch.zeros(shape) for shape in shapes] for _ in range(n)]
    group.allgather_coalesced(lists, xs).wait()
    for r, row in enumerate(lists):
        for x, all_of_it in zip(row, everyone, strict=True):
            assert torch.equal(x, all_of_it[r])
    x = torch.tensor([rank + 1.0])
    group.allreduce_coalesced([x, x]).wait()  # listed twice, reduced once
    assert x.item() == n * (n + 1) / 2


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_sparse(op: Any) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def of(r: int) -> Tensor:  # rank 0 has no elements, others twice the same
        rows = [0, r, r][: 3 * (r > 0)]
        values = torch.full((len(rows), 2), r + 1.0)
        return torch.sparse_coo_tensor(
            torch.tensor([rows]).long(), values, (5, 2), check_invariants=True
        )

    x = of(rank)
    dist.all_reduce(x, op)
    want = torch.stack([of(r).to_dense() for r in range(n)]).sum(0)
    assert x.is_sparse
    torch.testing.assert_close(x.to_dense(), want / n if op == ReduceOp.AVG else want)
    with pytest.raises(TypeError, match="summed or averaged only"):
        dist.all_reduce(of(rank), ReduceOp.MAX)
    with pytest.raises(MismatchError, match="have shapes"):
        dist.all_reduce(torch.zeros(3 + (rank == 1), 2).to_sparse())


def test_an_average_of_sparse_integers() -> None:
    """Not by way of float32, which lacks the odd integers above 2^24."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.tensor([(1 << 40) + n * (1 + rank), 0])
    y = x.to_sparse()
    dist.all_reduce(x, ReduceOp.AVG)
    dist.all_reduce(y, ReduceOp.AVG)
    assert y.dtype is torch.int64
    assert y.to_dense().tolist() == x.tolist() == [(1 << 40) + n * (n + 1) // 2, 0]


def test_objects() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    found: list[Any] = [None] * n
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert found == [{"rank": r, "text": "x" * 1000 * r} for r in range(n)]
    sent = [rank, "of", rank] if rank == 1 else [None] * 3
    dist.broadcast_object_list(sent, src=1)
    assert sent == [1, "of", 1]
    at_root: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object((rank,), at_root, dst=0)
    assert at_root == ([(r,) for r in range(n)] if rank == 0 else None)
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(n)] if rank == 1 else None, src=1)
    assert out == [f"for {rank}"]


@pytest.mark.parametrize("by_future", [True, False])
def test_tensors_of_inference_mode(by_future: bool) -> None:
    """Also where the results are written out of it: by a thread of the backend, or of the user."""
    n, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % n, (rank - 1) % n
    with torch.inference_mode():
        x = data(rank, torch.float32)
        outs = [torch.zeros_like(x) for _ in range(n)]
        total, received = x.t().clone().t(), torch.zeros(SHAPE[::-1]).t()  # not contiguous
        works = [
            dist.all_gather(outs, x, async_op=True),
            dist.all_reduce(total, async_op=True),
            dist.isend(x, to),
            dist.irecv(received, source),
        ]
    for work in works:
        work.get_future().wait() if by_future else work.wait()
    xs = [data(r, torch.float32) for r in range(n)]
    assert all(torch.equal(y, other) for y, other in zip(outs, xs, strict=True))
    assert torch.equal(total, torch.stack(xs).sum(0))
    assert torch.equal(received, xs[source])


def written(kind: str, x: Tensor, shared: Tensor, n: int, rank: int) -> None:
    """Calls c10d so that all ranks, or the one with data, write into `shared`; x is like it."""
    others = [x.clone() for _ in range(n - 1)]
    if kind == "all_reduce":
        dist.all_reduce(shared)
    elif kind == "bitwise":
        dist.all_reduce(shared.long() if shared is x else x.long()[:1].expand(2, 3), ReduceOp.BOR)
    elif kind == "broadcast":
        dist.broadcast(shared, 0)
    elif kind == "reduce":
        dist.reduce(shared, 1)
    elif kind == "all_gather":
        dist.all_gather([*others, shared], x)
    elif kind == "gather":
        dist.gather(x, [*others, shared] if rank == 1 else None, dst=1)
    elif kind == "scatter":
        dist.scatter(shared, [x.clone() for _ in range(n)] if rank == 0 else None, src=0)
    elif kind == "reduce_scatter":
        dist.reduce_scatter(shared, [x.clone() for _ in range(n)])
    elif kind == "all_to_all":
        dist.all_to_all([*others, shared], [x.clone() for _ in range(n)])


WRITTEN = ["all_reduce", "bitwise", "broadcast", "reduce", "all_gather", "gather", "scatter"]
WRITTEN += ["reduce_scatter", "all_to_all"]


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("kind", WRITTEN)
def test_outputs_whose_elements_share_memory(kind: str, shifted: bool) -> None:
    """An error on all ranks before anything is written, though rank 1 alone has such a tensor."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((2, 3), rank + 1.0)
    own = torch.full((4,), rank + 1.0)
    shared = own.as_strided((2, 3), (1, 1)) if shifted else own[:3].expand(2, 3)
    with pytest.raises(ValueError, match=r"elements of a tensor .* share memory"):
        written(kind, x, shared if rank == 1 else x, n, rank)
    assert own.tolist() == [rank + 1.0] * 4
    assert torch.equal(x, torch.full((2, 3), rank + 1.0))
    dist.barrier()


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_inputs_whose_elements_share_memory(kind: str) -> None:
    """Nobody writes to the tensor of a rank that only sends."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((1, 3), rank + 1.0).expand(2, 3)
    if kind == "broadcast":
        x = x if rank == 0 else x.contiguous()
        dist.broadcast(x, 0)
    else:
        x = x.contiguous() if rank == 0 else x
        dist.reduce(x, 0)
    total = n * (n + 1) / 2 if rank == 0 else rank + 1.0
    assert torch.equal(x, torch.full((2, 3), 1.0 if kind == "broadcast" else total))


def test_a_receive_into_elements_that_share_memory() -> None:
    rank = dist.get_rank()
    if rank > 1:
        return
    x = torch.zeros(3).expand(2, 3)
    with pytest.raises(ValueError, match=r"elements of a tensor .* share memory"):
        dist.recv(x, 0) if rank else dist.send(x, 1)
