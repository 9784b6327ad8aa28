# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a GPU ends in the same typed error on every rank, soon."""

import re
import textwrap
from pathlib import Path

from harness import gpu

TESTS = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(TESTS), "FARANDOLE_GPU_BACKEND": "nccl"}
SOON = 20.0  # seconds until a survivor has heard of a death and given its communicator up

HEAD = """
import os, signal, time
from harness import gpu
{share}
import cupy
import farandole as fd
fd.init()
rank, size = fd.rank(), fd.size()

def tell(error):
    kind = type(error).__name__
    print(f"rank {{rank}} at {{time.time()}}: {{kind}}: {{error}} <end>", flush=True)
"""
SHARE = 'gpu.share(int(os.environ["FARANDOLE_RANK"]))'


def program(body: str, share: str = SHARE) -> str:
    return HEAD.format(share=share) + textwrap.dedent(body)


def told(job, dead: int | None = None) -> list[tuple[float, str, str]]:
    """(when, class, text) of each living rank; fails with all output where one has told nothing."""
    found = []
    for rank, process in enumerate(job.ranks):
        if rank != dead:
            pattern = rf"rank {rank} at ([\d.]+): (\w+): (.*?) <end>"
            match = re.search(pattern, process.output, re.DOTALL)
            assert match, job.output()
            found.append((float(match[1]), match[2], match[3]))
    return found


def test_a_death_while_buckets_are_under_way(fork_ranks):
    """A kernel of NCCL waits for the dead rank's data until the communicator is given up."""
    body = """
    x = cupy.full(8 << 20, rank + 1, cupy.float32)
    fd.allreduce(x, name="opens")
    fd.barrier()
    if rank == 1:
        fd.allreduce(x, name="before")
        print(f"dies at {time.time()}.", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(100_000):
            y = fd.allreduce(x, name="before" if step == 0 else "after")
            cupy.cuda.get_current_stream().synchronize()
    except fd.FarandoleError as error:
        tell(error)
    os._exit(0)
    """
    job = fork_ranks(program(body), 3, ENVIRONMENT)
    job.finish(timeout=120)
    died = float(re.search(r"dies at ([\d.]+)\.", job.ranks[1].output)[1])
    for when, kind, _ in told(job, dead=1):
        assert kind in ("PeerError", "LibraryError")
        assert when - died < SOON


def test_two_ranks_on_one_gpu_by_accident(fork_ranks):
    """All of them learn how to choose, and how to share on purpose."""
    body = """
    try:
        fd.allreduce(cupy.ones(1000, cupy.float32), name="shared")
    except ValueError as error:
        tell(error)
    """
    device = gpu.environment()["FARANDOLE_TEST_GPUS"].split(",")[0]
    job = fork_ranks(program(body, ""), 2, {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": device})
    job.finish(timeout=60)
    for _, _, text in told(job):
        assert "ranks 0 and 1 both use" in text
        assert "torch.cuda.set_device(farandole.local_rank())" in text
        assert "FARANDOLE_SHARED_GPU=host" in text


def test_too_large_a_result_names_the_sizes(fork_ranks):
    """On all ranks; and smaller calls go on."""
    body = """
    total = cupy.cuda.runtime.memGetInfo()[1]
    fd.allreduce(cupy.ones(1000), name="opens")
    x = cupy.empty(int(0.3 * total), cupy.uint8)
    try:
        fd.allgather(x, name="too large")
    except fd.FarandoleError as error:
        tell(error)
    del x
    cupy.get_default_memory_pool().free_all_blocks()
    assert float(fd.allreduce(cupy.full(10, rank + 1.0), op=fd.Sum, name="small")[0]) == 3
    """
    job = fork_ranks(program(body), 2, ENVIRONMENT)
    for result in job.finish(timeout=120):
        result.check()
    for _, kind, text in told(job):
        assert kind == "LibraryError"
        assert re.search(r"no memory for \d{10,} bytes", text), text


def test_a_missing_nccl(fork_ranks):
    """An error with the remedy where it is asked for, else host memory, said once."""
    body = """
    try:
        total = fd.allreduce(cupy.full(1000, rank + 1.0), op=fd.Sum, name="staged")
        assert float(total.sum()) == 3000
    except fd.FarandoleError as error:
        tell(error)
    """
    missing = {**ENVIRONMENT, "FARANDOLE_NCCL_LIBRARY": "/no/such/libnccl.so.2"}
    job = fork_ranks(program(body), 2, missing)
    job.finish(timeout=60)
    for _, kind, text in told(job):
        assert kind == "LibraryError"
        assert "no usable NCCL" in text
    job = fork_ranks(program(body), 2, {**missing, "FARANDOLE_GPU_BACKEND": "auto"})
    for result in job.finish(timeout=60):
        result.check()
    assert job.output().count("travel through host memory") == 1


def test_an_argument_error_on_one_rank_reaches_the_other(fork_ranks):
    body = """
    x = cupy.ones((10, 10))[:, ::2] if rank == 0 else cupy.ones((10, 5))
    try:
        fd.allreduce_(x, name="strided")
    except (ValueError, fd.FarandoleError) as error:
        tell(error)
    assert float(fd.allreduce(cupy.full(10, rank + 1.0), op=fd.Sum, name="next")[0]) == 3
    """
    job = fork_ranks(program(body), 2, ENVIRONMENT)
    for result in job.finish(timeout=60):
        result.check()
    assert all("contiguous" in text for _, _, text in told(job))
