# SPDX-License-Identifier: Apache-2.0
"""Every collective through pinned host memory, as where there is no NCCL."""

import os

import pytest

from harness.collectives import CHECKS
from harness.gpu_arrays import LIBRARIES

os.environ["FARANDOLE_GPU_BACKEND"] = "host"  # read by init(), which comes later

pytestmark = pytest.mark.ranks(2)
FEW = [("cupy", "float32"), ("cupy", "uint8"), ("torch", "bfloat16")]


@pytest.mark.parametrize(("library", "dtype"), FEW)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(check, library, dtype):
    check(LIBRARIES[library](), dtype)
