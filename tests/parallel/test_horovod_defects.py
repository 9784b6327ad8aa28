# SPDX-License-Identifier: Apache-2.0
"""Defects that one can read in Horovod's source, by number: each test shows what holds here.

Not in this file: 2 (what is cached) is the coordinator's, in tests/csrc; 7 (errors on one rank) is
test_arguments.py's; 9 (timeline) and 16 (autotuner) have no counterpart; 11 (NCCL) needs GPUs.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

import farandole.torch as hvd


def assert_equal_everywhere(x: Tensor) -> None:
    assert torch.equal(x, hvd.broadcast(x.detach(), root_rank=0))


def sgd(*parameters: Tensor, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(list(parameters), lr=1.0, **options)


# ---- 1


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("op", ["Product", "Min", "Max", "Sum"])
def test_1_joined_ranks_count_as_the_identity(op: str) -> None:
    """They are the identity of the reduction, whatever it is."""
    if hvd.rank() != 0:
        sign = -1.0 if op == "Max" else 1.0
        x = torch.full((5,), sign * (hvd.rank() + 1))
        active = sign * torch.arange(2.0, hvd.size() + 1)
        wanted = {
            "Product": active.prod(),
            "Min": active.min(),
            "Max": active.max(),
            "Sum": active.sum(),
        }[op]
        assert hvd.allreduce(x, op=getattr(hvd, op), name="tail").tolist() == [wanted.item()] * 5
    hvd.join()


def test_1_ranks_without_data_do_not_damp_the_average() -> None:
    """A rank without data says so by its weight, and the average is that over the samples."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(sgd(p))
    empty = hvd.size() > 1 and hvd.rank() == 0
    optimizer.set_weight(0 if empty else 1)
    if not empty:
        (p * 6.0).sum().backward()
    else:
        optimizer.synchronize()
    assert p.grad.tolist() == [6.0]
    optimizer.step()


# ---- 3, 4, 5


def test_3_bfloat16_and_bool_are_taken() -> None:
    x = torch.full((3,), 1.0 + hvd.rank(), dtype=torch.bfloat16)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3
    flags = {"mask": torch.tensor([hvd.rank() == 0, True])}
    hvd.broadcast_parameters(flags, root_rank=0)
    assert flags["mask"].tolist() == [True, True]
    assert hvd.allreduce(torch.tensor([1, 2], dtype=torch.int8), op=hvd.Max).tolist() == [1, 2]


def test_4_zero_grad_takes_its_argument_and_unused_gradients_stay_none() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd(used, unused, weight_decay=0.5))
    used.sum().backward()
    optimizer.step()
    assert unused.grad is None
    assert unused.tolist() == [1.0, 1.0]  # zeros would have let weight decay move it
    optimizer.zero_grad(set_to_none=False)
    assert used.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad(set_to_none=True)
    assert used.grad is None


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_5_gradient_predivide_factor_counts_with_groups_too(groups: int | None) -> None:
    """In float16 it keeps a sum of large values finite: 2 ranks of 40,000 each overflow without."""
    p, q = (nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        sgd(p, q), gradient_predivide_factor=float(hvd.size()), groups=groups
    )
    (p * 40000.0).sum().backward()
    (q * 2.0).sum().backward()
    optimizer.synchronize()
    assert p.grad.tolist() == [40000.0] * 2
    assert q.grad.tolist() == [2.0] * 2


# ---- 6, 8


@pytest.mark.ranks(3, 4)
def test_6_alltoall_in_a_set_answers_with_the_size_of_the_set() -> None:
    process_set = hvd.add_process_set([0, 2])
    if process_set.included():
        x = torch.tensor([10.0, 20.0]) + hvd.rank()
        handle = hvd.alltoall_async(x, name="in a set", process_set=process_set)
        output, received = hvd.synchronize(handle)
        assert received.tolist() == [1, 1]
        assert output.tolist() == [10.0 + hvd.rank() * 5, 12.0 + hvd.rank() * 5]
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


@pytest.mark.ranks(2)
def test_8_waiting_leaves_its_core_to_others() -> None:
    """Rank 1 computes for half a second of its CPU time; rank 0, which waits, uses little."""
    hvd.barrier()
    if hvd.rank() == 1:
        begin = time.process_time()
        while time.process_time() - begin < 0.5:
            torch.ones(1000).sum()
    begin, since = time.process_time(), time.monotonic()
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="late"))
    used, waited = time.process_time() - begin, time.monotonic() - since
    if hvd.rank() == 0:
        assert waited > 0.3
        assert used < 0.3 * waited


# ---- 10, 13


@pytest.mark.ranks(2, 3)
def test_10_batch_normalisations_have_names_of_their_own() -> None:
    """Two layers at once, in another order on each rank."""
    layers = [hvd.SyncBatchNorm(3).double(), hvd.SyncBatchNorm(5).double()]
    inputs = [
        torch.randn(4, layer.num_features, dtype=torch.float64, requires_grad=True)
        for layer in layers
    ]
    outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    sum(y.pow(3).sum() for y in outputs).backward()
    for layer, x, y in zip(layers, inputs, outputs, strict=True):
        joined = hvd.allgather(x.detach(), name=f"joined {layer.num_features}")
        plain = nn.BatchNorm1d(layer.num_features).double()
        rows = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        torch.testing.assert_close(y, plain(joined)[rows])


def test_10_broadcasting_an_optimizers_state_makes_no_step() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert p.tolist() == [1.0, 1.0]
    assert p.grad is None


def test_13_resuming_leaves_all_ranks_equal_to_the_one_with_the_checkpoint() -> None:
    """The usual order: parameters first, then the state that only rank 0 has loaded."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9, weight_decay=0.1)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.25
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_parameters([("p", p)], root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_equal_everywhere(p)
    assert_equal_everywhere(optimizer.state[p]["momentum_buffer"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert p.grad is None


# ---- 12


def test_12_no_second_copy_of_nccl_is_linked() -> None:
    library = next(
        line for line in Path("/proc/self/maps").read_text().splitlines() if "libfarandole" in line
    ).split()[-1]
    dynamic = subprocess.run(
        ["readelf", "--dynamic", library], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(name.startswith("libc.so") for name in needed)
    for name in ("libnccl", "libcuda", "libtorch", "libpython", "libmpi"):
        assert not [other for other in needed if other.startswith(name)]


# ---- 14


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("missing", ["first", "second"])
def test_14_a_partly_filled_group_is_reduced(missing: str) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(sgd(p, q), groups=[[p, q]])
    own = {"first": p, "second": q}[missing]
    used = [x for x in (p, q) if hvd.rank() != 0 or x is not own]
    torch.cat([x * 2.0 for x in used]).sum().backward()
    optimizer.step()
    share = 2.0 * (hvd.size() - 1) / hvd.size()
    for parameter in (p, q):
        wanted = share if parameter is own else 2.0
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, wanted))


def test_14_groups_with_sparse_gradients() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    bias = nn.Parameter(torch.zeros(2))
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        sgd(*table.parameters(), bias), groups=1, sparse_as_dense=True
    )
    (table(torch.tensor([hvd.rank(), 5])) + bias).sum().backward()
    optimizer.step()
    wanted = torch.zeros(6, 2)
    wanted[: hvd.size()] = 1.0 / hvd.size()
    wanted[5] += 1.0
    torch.testing.assert_close(table.weight.grad.to_dense(), wanted)
    assert_equal_everywhere(table.weight)


# ---- 15


def test_15_init_after_shutdown_works_under_mpi() -> None:
    for turn in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        MPI.COMM_WORLD.Barrier()
        hvd.init()
        mine = torch.tensor([float(hvd.rank() + turn)])
        wanted = sum(r + turn for r in range(hvd.size()))
        assert hvd.allreduce(mine, op=hvd.Sum, name="again").item() == wanted
