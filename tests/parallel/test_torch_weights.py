# SPDX-License-Identifier: Apache-2.0
"""Unequal batches, and learning rates of many ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farandole.torch as hvd


def samples(rank: int, step: int) -> torch.Tensor:
    """A batch of another size on every rank and in every step; none at all on one."""
    count = (rank * 3 + step * 2 + 1) % 5 if hvd.size() > 1 else 3
    return torch.arange(count * 2.0).reshape(count, 2) + rank


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"gradient_predivide_factor": 2.0}])
def test_the_average_over_unequal_batches_is_that_over_all_samples(options: Any) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([p, q], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, **options)
    for step in range(5):
        everything = torch.cat([samples(r, step) for r in range(hvd.size())])
        mine = samples(hvd.rank(), step)
        optimizer.zero_grad()
        optimizer.set_weight(len(mine))
        if len(mine):
            ((mine * p).sum(1) * 2 + q).mean().backward()
        else:
            optimizer.synchronize()
        optimizer.step()
        torch.testing.assert_close(p.grad, everything.mean(0) * 2)
        torch.testing.assert_close(q.grad, torch.ones(1))


KINDS = [int, float, np.float32, np.int64, lambda w: torch.tensor(w), lambda w: np.array([w])]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shift", range(len(KINDS)))
def test_weights_of_any_kind_are_mixed(shift: int) -> None:
    """Ints, floats, tensors and NumPy's numbers, another one on every rank."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    optimizer.set_weight(KINDS[(hvd.rank() + shift) % len(KINDS)](hvd.rank() + 1))
    (p * (hvd.rank() + 2.0)).sum().backward()
    optimizer.step()
    weights = [r + 1 for r in range(hvd.size())]
    wanted = sum(w * (r + 2.0) for r, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(p.grad, torch.tensor([wanted]))


WRONG: list[Any] = [-1.0, -3, math.inf, math.nan, None, "2", [1.0], object(), 10**400, True]
WRONG += [torch.tensor(-1), torch.tensor([1.0, 2.0]), np.float32("nan")]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_weight_fails_on_all_ranks(wrong: Any) -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    with pytest.raises(ValueError, match="set_weight"):
        optimizer.set_weight(wrong if hvd.rank() == 0 else 1.0)
    for zero in (0, 0.0, torch.zeros(())):
        with pytest.raises(ValueError, match="more on one"):
            optimizer.set_weight(zero)
    optimizer.set_weight(1)
    other = nn.Parameter(torch.zeros(1))
    sums = hvd.DistributedOptimizer(torch.optim.SGD([other], lr=0.1), op=hvd.Sum)
    with pytest.raises(ValueError, match="Average only"):
        sums.set_weight(1)
