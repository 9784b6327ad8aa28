# SPDX-License-Identifier: Apache-2.0
"""The table that tests/gpu runs on cards, on the GPU double: the table itself is right."""

import numpy as np
import pytest

import farandole as fd
from harness import gpu_collectives
from harness.gpu_double import Gpu, use_double

use_double()
pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.alone,  # the GPU double stays in a process
]


class Double:
    """What the table needs of a library, with the arrays of the double."""

    def __init__(self, device):
        self._gpu = Gpu(device)

    def put(self, x, dtype):
        return self._gpu.array(np.asarray(x, dtype))

    def get(self, x):
        return self._gpu.read(x)


@pytest.fixture(scope="module")
def double():
    fd.init()  # before the fixture that does so for each test
    return Double(fd.rank())


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
@pytest.mark.parametrize("check", gpu_collectives.CHECKS, ids=lambda check: check.__name__)
def test_collective(double, check, dtype):
    check(double, dtype)
