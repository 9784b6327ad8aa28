# SPDX-License-Identifier: Apache-2.0
"""FARANDOLE_CHECK_NUMERICS: the rank and tensor where NaN or infinity comes up, on all ranks."""

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as hvd
from harness.ranks import restarted


@pytest.fixture(autouse=True)
def checked():
    with restarted(FARANDOLE_CHECK_NUMERICS="1"):
        yield


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_all_ranks_name_the_first(dtype, value):
    bad = fd.size() - 1
    x = np.full((7, 900), fd.rank() + 1, dtype)
    if fd.rank() == bad:
        x[3, 17] = value
    text = rf"allreduce 'w': the input of rank {bad} holds NaN or infinity, first at element 2717 "
    with pytest.raises(ValueError, match=text):
        fd.allreduce(x, name="w", op=fd.Sum)
    x = np.full((7, 900), fd.rank() + 1, dtype)
    total = fd.size() * (fd.size() + 1) // 2
    assert np.all(fd.allreduce(x, name="w", op=fd.Sum) == total)


def test_what_is_finite_or_has_no_nan_passes():
    x = np.array([np.finfo(np.float32).max, -0.0, np.float32(1e-45)], np.float32)
    assert np.array_equal(fd.allreduce(x, name="edges", op=fd.Max), x)
    big = np.full(5000, -1, np.int64)  # all bits set
    assert np.all(fd.allreduce(big, name="bits", op=fd.Max) == -1)
    x = np.full(4, np.nan if fd.rank() else 1.0)
    assert np.all(fd.broadcast(x, root_rank=0, name="receives only") == 1.0)


@pytest.mark.ranks(2, 3, 4)
def test_nan_in_a_gradient_is_named_before_it_spreads():
    p = torch.nn.Parameter(torch.zeros(3000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("weight", p)])
    with pytest.raises(ValueError, match="weight': the input of rank 1 holds NaN"):
        (p * (np.nan if fd.rank() == 1 else 1.0)).sum().backward()
    optimizer.zero_grad()
    assert not p.isnan().any()
    assert fd.allreduce(np.ones(1), op=fd.Sum) == fd.size()
