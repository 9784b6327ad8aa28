# SPDX-License-Identifier: Apache-2.0
"""gpu_facts.py RANK SIZE FOLDER: one rank that prints what NCCL's functions return, through ctypes.

tools/gpu_first_minutes.py runs SIZE such ranks. They synchronize through files in FOLDER.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from farandole.installed import open_library

BYTES = 2 << 20


class NcclUniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class NcclConfig(ctypes.Structure):
    """The first members of ncclConfig_t, declared as in farandole."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class NcclRank:
    """One rank, which records what NCCL returns. Ranks synchronize through files in `folder`."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.facts: dict[str, object] = {}
        self.nccl = _library("NCCL")
        self.comm = ctypes.c_void_p()
        self.cuda = cuda = _library("CUDA")
        context = ctypes.c_void_p()
        devices = ctypes.c_int(1)
        cuda.cuInit(0)
        if hasattr(cuda, "cuDeviceGetCount"):
            cuda.cuDeviceGetCount(ctypes.byref(devices))
        else:  # the test double
            devices.value = size
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank % devices.value)
        cuda.cuCtxPushCurrent_v2(context)

    def meet(self, point: str) -> None:
        """Waits until all ranks have reached this point."""
        (self.folder / f"{point}.{self.rank}").touch()
        for rank in range(self.size):
            self.await_file(f"{point}.{rank}")

    def await_file(self, name: str) -> None:
        """Waits for a file, for at most a minute."""
        end = time.monotonic() + 60
        while not (self.folder / name).exists():
            if time.monotonic() > end:
                raise SystemExit(f"rank {self.rank}: nobody has written {name}")
            time.sleep(0.001)

    def state(self) -> int:
        """The state that ncclCommGetAsyncError reports for the communicator."""
        found = ctypes.c_int()
        self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(found))
        return found.value

    def open(self) -> None:
        """Creates the communicator."""
        unique, path = NcclUniqueId(), self.folder / "id"
        if self.rank == 0:
            self.nccl.ncclGetUniqueId(ctypes.byref(unique))
            path.with_suffix(".part").write_bytes(bytes(unique))
            path.with_suffix(".part").rename(path)
        self.await_file("id")
        unique = NcclUniqueId.from_buffer_copy(path.read_bytes())
        config = NcclConfig(ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 21400, 1)
        self.nccl.ncclCommInitRankConfig.argtypes = [
            ctypes.c_void_p, ctypes.c_int, NcclUniqueId, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        made = ctypes.byref(self.comm)
        self.facts["init returns"] = self.nccl.ncclCommInitRankConfig(
            made, self.size, unique, self.rank, ctypes.byref(config)
        )

    def reduce(self, name: str) -> None:
        """Runs a group that has one allreduce."""
        memory, portable = ctypes.c_void_p(), 1  # pinned, so that a GPU can use it, too
        self.cuda.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(BYTES), portable)
        self.nccl.ncclGroupStart()
        count, float32, total, stream = ctypes.c_size_t(4), 7, 0, ctypes.c_void_p()
        self.nccl.ncclAllReduce(memory, memory, count, float32, total, self.comm, stream)
        self.facts[name] = self.nccl.ncclGroupEnd()

    def synchronize(self) -> None:
        """Waits until the default stream is idle."""
        event = ctypes.c_void_p()
        self.cuda.cuEventCreate(ctypes.byref(event), 0)
        self.cuda.cuEventRecord(event, None)
        self.cuda.cuEventSynchronize(event)

    def run(self) -> dict[str, object]:
        """Collects all facts that this rank observes."""
        self.open()
        self.meet("open")
        self.reduce("group_end returns")
        self.facts["state after group_end"] = self.state()
        self.reduce("the second group_end returns")
        self.synchronize()
        self.meet("reduced")
        return self.facts


def _library(name: str) -> ctypes.CDLL:
    file = {"CUDA": "libcuda.so.1", "NCCL": "libnccl.so.2"}[name]
    library, _ = open_library(f"FARANDOLE_{name}_LIBRARY", [file])
    if library is None:
        raise SystemExit(f"there is no {file}")
    return library  # type: ignore[no-any-return]


def main() -> None:
    """Prints one fact per line. Does not close communicators."""
    rank, size, folder = sys.argv[1:]
    for name, value in NcclRank(int(rank), int(size), Path(folder)).run().items():
        print(f"{name}={value!r}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
