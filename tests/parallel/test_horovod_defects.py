# SPDX-License-Identifier: Apache-2.0
"""Defects that one can read in Horovod's source: what holds here, where no other file shows it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farandole.torch as hvd


def assert_equal_everywhere(x: Tensor) -> None:
    assert torch.equal(x, hvd.broadcast(x.detach(), root_rank=0))


def sgd(*parameters: Tensor, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(list(parameters), lr=1.0, **options)


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_gradient_predivide_factor_counts_with_groups_too(groups: int | None) -> None:
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


@pytest.mark.ranks(2)
def test_waiting_leaves_its_core_to_others() -> None:
    """Rank 1 uses half a second of CPU time; rank 0, which waits for it, uses little."""
    hvd.barrier()
    if hvd.rank() == 1:
        begin = time.process_time()
        while time.process_time() - begin < 0.5:
            torch.ones(1000).sum()
    begin = time.process_time()
    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="late"))
    assert hvd.rank() != 0 or time.process_time() - begin < 0.2


def test_no_second_copy_of_nccl_is_linked() -> None:
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


def test_groups_with_sparse_gradients() -> None:
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


def test_a_scaled_reducescatter_above_the_fusion_threshold_works() -> None:
    """Horovod fails; 33 MiB here."""
    rows = (33 << 20) // 4 // hvd.size()
    x = torch.full((rows * hvd.size(),), hvd.rank() + 1.0)
    result = hvd.reducescatter(x, op=hvd.Sum, name="large", prescale_factor=0.5)
    assert result.shape == (rows,)
    assert (result == hvd.size() * (hvd.size() + 1) / 4).all()
