# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks on a GPU: the card's facts, DDP's NCCL group, and the main function."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from turns import Row, finish, save

import farandole.torch as hvd

__all__ = ["Part", "about", "main", "nccl_group"]

Part = Callable[[], list[Row]]


def about() -> dict[str, str]:
    """Facts on which numbers from a GPU depend."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "GPU": f"{torch.cuda.get_device_name()}, {memory >> 30} GiB",
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


@contextlib.contextmanager
def nccl_group() -> Iterator[None]:
    """Context with torch's default process group over NCCL, for DDP. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        path = hvd.broadcast_object(folder, 0)
        store = dist.FileStore(f"{path}/store", hvd.size())
        dist.init_process_group("nccl", store=store, rank=hvd.rank(), world_size=hvd.size())
        try:
            yield
        finally:
            dist.destroy_process_group()


def main(description: str | None, measure: Callable[[bool], Iterable[Part]]) -> int:
    """Runs a script's parts, which print their rows. Returns 1 if one failed or a result is wrong.

    With one rank, the other parts still run after a failure. Writes JSON after each part, so that
    an interrupted script leaves it.
    """
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
    rows: list[Row] = []
    failures = 0
    with nccl_group():
        for part in measure(options.quick):
            try:
                rows += part()
            except Exception:
                if hvd.size() > 1:  # the others may wait for this rank
                    raise
                failures += 1
                traceback.print_exc()
            save(rows, options.json, gpu=about(), failures=failures)
            gc.collect()
            torch.cuda.empty_cache()
    code = finish(rows, options.json, gpu=about(), failures=failures)
    hvd.shutdown()
    return code or int(failures > 0)
