# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks on a GPU share: the card, its NCCL group for DDP, and the end of a script."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from turns import Row, finish

import farandole.torch as hvd

__all__ = ["about", "main", "nccl_group"]


def about() -> dict[str, str]:
    """What numbers from a GPU depend on."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "GPU": f"{torch.cuda.get_device_name()}, {memory >> 30} GiB",
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


@contextlib.contextmanager
def nccl_group() -> Iterator[None]:
    """torch's default process group over NCCL, for DistributedDataParallel; collective."""
    with tempfile.TemporaryDirectory() as folder:
        path = hvd.broadcast_object(folder, 0)
        store = dist.FileStore(f"{path}/store", hvd.size())
        dist.init_process_group("nccl", store=store, rank=hvd.rank(), world_size=hvd.size())
        try:
            yield
        finally:
            dist.destroy_process_group()


def main(description: str | None, measure: Callable[[bool], list[Row]]) -> int:
    """A script: `measure(quick)` prints its table and gives the rows; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]} needs an NVIDIA GPU", file=sys.stderr)
        return 1
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if hvd.rank() == 0:
        print(*(f"# {name}: {value}" for name, value in about().items()), sep="\n", flush=True)
    with nccl_group():
        rows = measure(options.quick)
    code = finish(rows, options.json, gpu=about())
    hvd.shutdown()
    return code
