# SPDX-License-Identifier: Apache-2.0
"""Every way to start init_process_group("farandole") meets all ranks, never worlds of one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from farandole.launch.place import free_port
from harness.launchers import install
from harness.mpirun import MPI_ENVIRONMENT, mpirun
from harness.process import PATIENCE, Process

ENVIRONMENT = {"OMP_NUM_THREADS": "1", **MPI_ENVIRONMENT}

# Arguments: a URL or `store`, and rank and size for it; none: what a launcher says.
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import farandole.torch as hvd

url, place = (sys.argv[1], [int(x) for x in sys.argv[2:]]) if sys.argv[1:] else ("", [])
try:
    if url == "plain":
        hvd.init()
        dist.init_process_group("farandole")
    elif url.startswith("store:"):
        store = dist.FileStore(url[len("store:"):], place[1])
        dist.init_process_group("farandole", store=store, rank=place[0], world_size=place[1])
    elif url == "mpi":
        dist.init_process_group("gloo", init_method="mpi://")
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.tensor([10.0 ** rank])
        dist.all_reduce(x)
        assert x.item() == sum(10.0 ** each for each in range(size))
        dist.destroy_process_group()
        dist.init_process_group("farandole", init_method="mpi://")
    elif url:
        dist.init_process_group("farandole", url, rank=place[0], world_size=place[1])
    else:
        dist.init_process_group("farandole")
except Exception as error:
    print(f"{type(error).__name__}: {error}.", flush=True)
    raise
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (hvd.rank(), hvd.size())
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Linear(3, 1))
model(torch.full((2, 3), rank + 1.0)).sum().backward()
own = model.module.weight.grad
x = torch.tensor([10.0 ** rank])
dist.all_reduce(x)
print(f"rank {rank} of {size}: {x.item():g}, {own.tolist()[0]}.", flush=True)
dist.destroy_process_group()
"""


def check(out: str, size: int) -> None:
    """Every rank has the sum of all ranks, and the average gradient."""
    total = sum(10**rank for rank in range(size))
    gradient = [float(size + 1)] * 3
    for rank in range(size):
        assert out.count(f"rank {rank} of {size}: {total}, {gradient}.") == 1, out


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def run(commands: Sequence[Sequence[str]], **variables: str) -> list[tuple[int, str]]:
    """Exit codes and outputs of commands side by side."""
    with ExitStack() as stack:
        environment = {**ENVIRONMENT, **variables}
        jobs = [stack.enter_context(Process(command, environment)) for command in commands]
        results = [job.wait(PATIENCE) for job in jobs]
        outputs = [job.output for job in jobs]
    assert all(results), outputs
    return [(result.returncode, result.out) for result in results if result]


def test_init_under_torchrun(program: str) -> None:
    """init_process_group() alone: test_no_import_is_needed, and test_place's script with DDP."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ((code, out),) = run([[*launcher, "--nproc-per-node=2", program, "plain"]])
    assert code == 0, out
    check(out, 2)


def test_mpirun_without_variables(program: str) -> None:
    check(mpirun([sys.executable, program, "mpi"], 2, timeout=PATIENCE).check().out, 2)


def test_mpi_without_a_launcher_is_an_error(program: str) -> None:
    ((code, out),) = run([[sys.executable, program, "mpi"]])
    assert code != 0
    assert "RuntimeError: mpi://: no launcher has started this process" in out, out


NO_IMPORT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("{backend}")
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
x = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(x)
print(f"rank {{dist.get_rank()}}: {{x.item():g}}, {{' '.join(place)}}.", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(torch, "_import_device_backends"), reason="torch before 2.5")
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [("mpirun", "cpu:farandole"), ("srun", "farandole"), ("torchrun", "farandole")],
)
def test_no_import_is_needed(launcher: str, backend: str, tmp_path: Path) -> None:
    """The variables are set by then."""
    path = tmp_path / "program.py"
    path.write_text(NO_IMPORT.format(backend=backend))
    variables = {}
    if launcher == "mpirun":
        out = mpirun([sys.executable, str(path)], 2, timeout=PATIENCE).check().out
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(path)]
        if launcher == "srun":
            double = install(tmp_path, "bin/srun", "srun")
            command = [double, "--ntasks", "2", "--mpi", "none", sys.executable, str(path)]
            variables["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
        ((code, out),) = run([command], **variables)
        assert code == 0, out
    for rank in range(2):
        assert out.count(f"rank {rank}: 11, {rank} 2 {rank} 2.") == 1, out


@pytest.mark.parametrize("url", ["store:{0}/met", "tcp://localhost:{1}"])
def test_a_store_and_no_launcher(program: str, url: str, tmp_path: Path) -> None:
    place = url.format(tmp_path, free_port())
    command = [sys.executable, program, place]
    results = run([[*command, str(rank), "2"] for rank in range(2)])
    out = "".join(out for _, out in results)
    assert [code for code, _ in results] == [0, 0], out
    check(out, 2)


def test_a_rank_that_does_not_come_to_the_store(program: str, tmp_path: Path) -> None:
    source = Path(program).read_text().replace("world_size=place[1])", "world_size=place[1], **T)")
    head = "from datetime import timedelta\nT = {'timeout': timedelta(seconds=2)}\n"
    Path(program).write_text(head + source)
    ((code, out),) = run([[sys.executable, program, f"store:{tmp_path}/met", "1", "2"]])
    assert code != 0
    assert "StallError: init(): rank 0 did not come to the rendezvous" in out, out


def test_no_launcher_and_no_store_is_an_error(program: str) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert not any(name in os.environ for name in names)
    ((code, out),) = run([[sys.executable, program]])
    assert code != 0
    assert "environment variable RANK expected" in out, out
