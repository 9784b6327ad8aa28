# SPDX-License-Identifier: Apache-2.0
"""Trains ResNet-50 in bfloat16 on a GPU: images per second with farandole, with DDP, with neither.

    python benchmarks/gpu_training.py [--json FILE] [--quick]

In each turn every contestant makes one step on the same 256 images, from an idle GPU to an idle
GPU. The table is like that of training.py. Goal at one rank: farandole within 1 % of "alone".
Parameters are compared with DDP's loosely, because cuDNN's sums differ between runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import gpu
import torch
from gpu_nets import RESNET
from training import ALONE, compete, show
from turns import Row, print_head

import farandole.torch as hvd


def measure(quick: bool) -> Iterator[gpu.Part]:
    torch.backends.cudnn.benchmark = True
    print_head(
        f"{'net':26} {'who':18} {'step ms':>9} {'a second':>10} {'wrong':>6}  exposed ms [95 %]"
    )
    yield functools.partial(_compete, 10 if quick else 40)


def _compete(turns: int) -> list[Row]:
    rows = compete(RESNET, turns, idle=torch.cuda.synchronize, tolerance=0.05)
    show(RESNET, rows)
    alone = next(row for row in rows if row.who == ALONE)
    for row in rows:
        if hvd.rank() == 0 and row.who != ALONE:
            print(f"# {row.who}: {row.ratio(alone):.4f} of the time alone")
    return rows


if __name__ == "__main__":
    sys.exit(gpu.main(__doc__, measure))
