# SPDX-License-Identifier: Apache-2.0
"""reduce: the root alone gets the result, the others keep what they have. Each op and dtype is in
harness/collectives.py, mismatches in test_errors.py, joined ranks in test_join_rows.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import farandole as fd
import farandole.torch as hvd
from harness.arrays import Array, assert_same, data, reduced

pytestmark = pytest.mark.ranks(2, 3, 4)

FACTORS = {"prescale_factor": 0.5, "postscale_factor": 4.0}


def right(op: str, inputs: list[Array], root: int) -> Array:
    """What this rank has to get."""
    return reduced(op, inputs) if fd.rank() == root else inputs[fd.rank()]


@pytest.mark.parametrize("place", ["all", "root", "others"])
def test_memory_that_peers_map(place: str) -> None:
    for root in range(fd.size()):
        inputs = [data(rank, (300_001,), "float32", root) for rank in range(fd.size())]
        there = place == "all" or (place == "root") == (fd.rank() == root)
        mine = fd.empty((300_001,), "float32") if there else np.empty(300_001, "float32")
        mine[:] = inputs[fd.rank()]
        fd.reduce_(mine, root, op=fd.Sum)
        assert_same(mine, right("Sum", inputs, root))


def test_groups_in_flight_to_every_root() -> None:
    inputs = [
        [data(r, shape, "float64", 7) for r in range(fd.size())] for shape in [(5,), (70_000,)]
    ]
    mine = [x[fd.rank()].copy() for x in inputs]
    handles = [
        (root, fd.grouped_reduce_async(mine, root, op=fd.Sum, **FACTORS), mine)
        for root in range(fd.size())
    ]
    for root in range(fd.size()):
        own = [x.copy() for x in mine]
        handles.append((root, fd.grouped_reduce_async_(own, root, op=fd.Sum, **FACTORS), own))
    for turn, (root, handle, given) in enumerate(handles):
        results = handle.wait()
        same = fd.rank() != root or turn >= fd.size()
        assert [x is y for x, y in zip(results, given, strict=True)] == [same] * 2
        for result, one in zip(results, inputs, strict=True):
            wanted = 2 * reduced("Sum", one) if fd.rank() == root else one[fd.rank()]
            assert_same(result, wanted)
    assert fd.grouped_reduce([], 0) == []
    assert fd.grouped_reduce_([], 0) == []


@pytest.mark.parametrize("call", ["reduce_async", "reduce_async_"])
@pytest.mark.parametrize("name", [None, "again"])
def test_repeated_calls(call: str, name: str | None) -> None:
    """They take a short way; the root changes, and what cannot be written to comes in between."""
    for turn in range(6):
        root = turn // 3 % fd.size()
        inputs = [np.full(9, 10.0 * turn + rank) for rank in range(fd.size())]
        mine = inputs[fd.rank()].copy()
        if turn % 3 == 2 and call == "reduce_async":
            mine.flags.writeable = False
        result = getattr(fd, call)(mine, root, op=fd.Sum, name=name).wait()
        assert_same(result, right("Sum", inputs, root))
        tensor = torch.from_numpy(inputs[fd.rank()].copy())
        result = getattr(hvd, call)(tensor, root, op=fd.Sum, name=name and f"{name}, torch").wait()
        assert_same(result, right("Sum", inputs, root))


@pytest.mark.ranks(3, 4)
def test_process_sets() -> None:
    pair = fd.add_process_set([0, 2])
    if pair.included():
        for root in (0, 2):
            mine = np.full(3000, 1.0 + fd.rank())
            result = fd.reduce(mine, root, op=fd.Average, process_set=pair)
            assert result.tolist() == [2.0 if fd.rank() == root else 1.0 + fd.rank()] * 3000
        with pytest.raises(ValueError, match="root rank 1 is not among ranks 0, 2"):
            fd.reduce(np.ones(2), 1, process_set=pair)
    fd.barrier()
    fd.remove_process_set(pair)


# ---- torch


def weights(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * (1 + rank)


@pytest.mark.parametrize("op", [None, hvd.Sum])
@pytest.mark.parametrize("name", [None, "named"])
def test_gradients(op: int | None, name: str | None) -> None:
    for root in range(fd.size()):
        x = (torch.ones(2, 3) * (1 + fd.rank())).requires_grad_()
        y = hvd.reduce(x, root, op=op, name=name, **FACTORS)
        total = 2.0 * sum(range(1, fd.size() + 1)) / (1 if op else fd.size())
        assert torch.equal(y, torch.full((2, 3), total if fd.rank() == root else 1.0 + fd.rank()))
        (y * weights(fd.rank())).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, weights(root) * 2 / (1 if op else fd.size()))


def test_gradients_of_groups_and_of_gradients() -> None:
    a, b = (torch.full((2,), float(k + fd.rank()), requires_grad=True) for k in (1, 5))
    ya, yb = hvd.grouped_reduce([a, b], 0, op=hvd.Sum)
    loss = (ya**3 + yb).sum()
    (first,) = torch.autograd.grad(loss, a, create_graph=True)
    total = sum(1.0 + rank for rank in range(fd.size()))
    torch.testing.assert_close(first, torch.full((2,), 3 * total**2))
    (second,) = torch.autograd.grad(first.sum(), a)
    torch.testing.assert_close(second, torch.full((2,), 6 * total * fd.size()))
    with pytest.raises(NotImplementedError, match="Average and Sum only"):
        hvd.reduce(a, 0, op=hvd.Max).sum().backward()
