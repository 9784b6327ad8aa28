# SPDX-License-Identifier: Apache-2.0
"""Compares farandole's pack and unpack kernel with the card's own copy, by the GPU's clock.

    python benchmarks/gpu_moves.py [--json FILE] [--quick]

A group of small tensors is reduced in place: one kernel packs it, another unpacks it. In each turn,
a device-to-device copy of the same number of bytes follows. The profiler measures all on the GPU.
GB/s count bytes read and bytes written. Goal: at least 0.8 of the copy's rate.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator

import gpt2
import gpu
import numpy as np
import resnet50
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from turns import Row, print_head

import farandole.torch as hvd

PACKED = 1 << 20  # largest tensor that is packed, in bytes
KERNEL, COPY = "farandole_move", "Memcpy DtoD"


def small(shapes: list[resnet50.Shape]) -> list[int]:
    """Numbers of elements of the tensors that are packed, as float32."""
    counts = [int(np.prod(shape)) for shape in shapes]
    return [count for count in counts if 4 * count <= PACKED]


SETS = {
    "ResNet-50, packed ones": small(resnet50.shapes()),
    "GPT-2 small, packed ones": small(gpt2.shapes()),
    "60 x 1 MiB": [PACKED // 4] * 60,
    "1,000 x 1 KiB": [256] * 1000,
}


def measure(quick: bool) -> Iterator[gpu.Part]:
    print_head(f"{'tensors':26} {'who':10} {'MB':>8} {'us':>9} {'GB/s':>8} {'of the copy':>12}")
    for name, counts in SETS.items():
        yield functools.partial(_set, name, counts, 5 if quick else 30)


def _set(name: str, counts: list[int], turns: int) -> list[Row]:
    tensors = [torch.full((count,), hvd.rank() + 1.0, device="cuda") for count in counts]
    source = torch.ones(sum(counts), device="cuda")
    target = torch.empty_like(source)

    def turn() -> None:
        hvd.grouped_allreduce_(tensors, op=hvd.Average, name=name)
        target.copy_(source)
        torch.cuda.synchronize()

    for _ in range(3):
        turn()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(turns):
            turn()
    moves = _seconds(found, KERNEL)
    copies = _seconds(found, COPY)
    if len(moves) != 2 * turns or len(copies) != turns:
        seen = Counter(event.name for event in found.events() or ())
        raise RuntimeError(
            f"{name}: {len(moves)} moves, {len(copies)} copies in {turns} turns; seen: {seen}"
        )
    average = (hvd.size() + 1) / 2
    wrong = sum(int((x != average).sum()) for x in tensors)
    rows = [
        Row(name, "pack", np.array(moves[0::2]), wrong),
        Row(name, "unpack", np.array(moves[1::2])),
        Row(name, "copy", np.array(copies)),
    ]
    _show(rows, 4 * sum(counts))
    return rows


def _seconds(found: profile, name: str) -> list[float]:
    """Seconds on the GPU of each kernel or copy of this name, in their order."""
    events = [event for event in found.events() or () if name in event.name]
    events = [event for event in events if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [1e-6 * event.time_range.elapsed_us() for event in events]


def _show(rows: list[Row], nbytes: int) -> None:
    for row in rows:
        rate = 2 * nbytes / row.median
        line = f"{row.what:26} {row.who:10} {nbytes / 1e6:8.1f} {1e6 * row.median:9.1f}"
        line += f" {rate / 1e9:8.0f} {1 / row.ratio(rows[-1]):12.2f}"
        if hvd.rank() == 0:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(gpu.main(__doc__, measure))
