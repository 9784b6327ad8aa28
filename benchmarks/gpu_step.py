# SPDX-License-Identifier: Apache-2.0
"""What communication adds to a step on a GPU, beside DistributedDataParallel: the host, and in all.

    python benchmarks/gpu_step.py [--json FILE] [--quick]

The gradients of ResNet-50 and of GPT-2 small become ready one by one in backward(), without the
arithmetic between. Each row is a step less the same step without communication; "host" ends when
the host has launched everything, "in all" when the GPU is idle. Every result is checked.
"""

from __future__ import annotations

import sys

import gpt2
import gpu
import resnet50
import torch
from backward import backward
from turns import Row, head

SETS = {"ResNet-50": resnet50.shapes, "GPT-2 small": gpt2.shapes}


def measure(quick: bool) -> list[Row]:
    """Both sets, both ways of timing."""
    turns, idle = 10 if quick else 40, torch.cuda.synchronize
    rows = []
    head()
    for name, shapes in SETS.items():
        rows += backward(f"{name}, host", shapes(), turns, "cuda", idle)
        rows += backward(f"{name}, in all", shapes(), turns, "cuda", idle, torch.cuda.synchronize)
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    sys.exit(gpu.main(__doc__, measure))
