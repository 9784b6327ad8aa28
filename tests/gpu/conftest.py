# SPDX-License-Identifier: Apache-2.0
"""Tests on a GPU run inside ranks, as those of tests/parallel do; ranks share it if they must."""

import os

from harness import gpu

if "FARANDOLE_TEST_STEP" in os.environ:  # in a rank; before anything looks at CUDA
    from harness.inner import runtime as runtime

    gpu.share(int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))))
    os.environ.setdefault("FARANDOLE_GPU_BACKEND", "nccl")  # never in silence by another way
