# SPDX-License-Identifier: Apache-2.0
"""The table that tests/gpu runs on cards, on the GPU double: the table itself is right."""

import os

import numpy as np
import pytest

import farandole as fd
from farandole.arrays.buffers import DTYPES, Buffer
from farandole.arrays.cuda_array import CudaArray
from harness.collectives import CHECKS
from harness.gpu_double import Gpu, use_double

use_double()
pytestmark = [
    pytest.mark.ranks(1, 2, 3, 4),
    pytest.mark.world("double"),  # the GPU double stays in a process
]


class Double:
    """What the table needs of a library, with the arrays of the double."""

    def __init__(self, device):
        self._gpu = Gpu(device)

    def put(self, x, dtype):
        if dtype != "bfloat16":
            return self._gpu.array(np.asarray(x, dtype))
        bits = np.asarray(x, np.float32).view(np.uint32) >> 16
        raw = self._gpu.array(bits.astype(np.uint16))
        place = raw.address, DTYPES.index(dtype), raw.shape, raw, self._gpu.device, raw.stream
        made = CudaArray.over(Buffer(*place))
        made.shape = raw.shape
        return made

    def get(self, x):
        raw = self._gpu.read(x)
        if getattr(x, "dtype", None) != "bfloat16":
            return raw
        return (raw.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(params=["nccl", "host"], scope="module")
def double(request):
    fd.shutdown()
    os.environ["FARANDOLE_GPU_BACKEND"] = request.param
    fd.init()  # before the fixture that does so for each test
    return Double(fd.rank())


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(double, check, dtype):
    check(double, dtype)
