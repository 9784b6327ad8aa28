# SPDX-License-Identifier: Apache-2.0
"""Measures the time that communication adds to a step on a GPU, compared with DDP.

    python benchmarks/gpu_step.py [--json FILE] [--quick]

The gradients of ResNet-50 and of GPT-2 small become ready one by one in backward(), without the
arithmetic between. Each row is a step minus the same step without communication. "host" is the time
until the host has launched everything, "in all" until the GPU is idle. Every result is checked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import gpt2
import gpu
import resnet50
import torch
from backward import backward
from turns import head

SETS = {"ResNet-50": resnet50.shapes, "GPT-2 small": gpt2.shapes}


def measure(quick: bool) -> Iterator[gpu.Part]:
    turns, idle = 10 if quick else 40, torch.cuda.synchronize
    head()
    for name, shapes in SETS.items():
        step = functools.partial(backward, shapes=shapes(), turns=turns, device="cuda", idle=idle)
        yield functools.partial(step, f"{name}, host")
        yield functools.partial(step, f"{name}, in all", end=idle)


if __name__ == "__main__":
    sys.exit(gpu.main(__doc__, measure))
