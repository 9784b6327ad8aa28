# SPDX-License-Identifier: Apache-2.0
"""Measures the GPU memory that farandole or DDP adds to training ResNet-50, by the driver's count.

    python benchmarks/gpu_memory.py [--json FILE]

Each contestant trains for three steps in a separate process, alone on the card. Then torch releases
the memory that it caches, and the free memory is read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import gpu
import torch
from gpu_nets import RESNET
from training import ALONE, DDP, OURS, Trainer

import farandole.torch as hvd

_STEPS = 3


def used(who: str) -> int:
    """Bytes in use on the card at the end of this process's training."""
    hvd.init()
    with gpu.nccl_group():
        contestant = Trainer(RESNET, who, torch.cuda.synchronize).contestant()
        for _ in range(_STEPS):
            contestant.prepare()
            contestant.run()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
    hvd.shutdown()
    return total - free


def _save(path: Path | None, **found: object) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--who", choices=(ALONE, OURS, DDP), help="only this one")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]} needs an NVIDIA GPU", file=sys.stderr)
        return 1
    if options.who:
        print(used(options.who))
        return 0
    found: dict[str, int] = {}
    failures = 0
    for who in (ALONE, OURS, DDP):
        command = [sys.executable, __file__, "--who", who]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode != 0:
            failures += 1
            print(f"{who:20} failed", flush=True)
            continue
        found[who] = int(result.stdout.split()[-1])
        more = f"{(found[who] - found[ALONE]) / (1 << 20):+10.0f} MiB" if ALONE in found else ""
        print(f"{who:20} {found[who] / (1 << 20):10.0f} MiB {more}", flush=True)
        _save(options.json, bytes=found)
    _save(options.json, bytes=found, gpu=gpu.about())  # last: the query uses GPU memory
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
