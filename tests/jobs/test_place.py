# SPDX-License-Identifier: Apache-2.0
"""N processes are one job or say that they are not: scripts that look at RANK, under every
launcher, and processes that meet nobody."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.mpirun import MPI_ENVIRONMENT, MpiJob, mpirun
from harness.process import PATIENCE, Process

Start = Callable[..., MpiJob]
FARANDOLE = str(Path(sys.executable).with_name("farandole"))

# The shape of scripts for torchrun: without RANK it is one process, and trains alone. Each rank has
# data of its own. Arguments: the backend, and what to import.
SCRIPT = """
import atexit, importlib, os, sys

backend, *modules = sys.argv[1:]
if backend == "gloo" and not modules:
    # After all else: torch's own threads may abort what follows (pytorch/pytorch#190489).
    atexit.register(os._exit, 0)

import torch
import torch.distributed as dist

for module in modules:
    importlib.import_module(module)
rank = int(os.environ.get("RANK", -1))
ddp = rank != -1
data = float(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or rank)
torch.manual_seed(11)
model = torch.nn.Linear(3, 1, bias=False)
before = model.weight.detach().clone()
if ddp:
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, int(os.environ["WORLD_SIZE"]))
    assert 0 <= int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1.0)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.full((1, 3), data)).sum().backward()
    optimizer.step()
moved = (before - next(iter(model.parameters()))).flatten().tolist()
print(f"moved by {moved[0]:.3f}.", flush=True)
if ddp:
    dist.destroy_process_group()
"""
ALONE, HVD = "without having met the others", "farandole.torch"
UNUSED = "ends without a single collective call"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def farandole_run(*words: str) -> str:
    """The output of a job of two ranks that ends well."""
    with Process([FARANDOLE, "run", "-np", "2", *words], MPI_ENVIRONMENT) as job:
        return job.end().check().out


@pytest.mark.parametrize(
    ("launcher", "backend", "modules"),
    [
        ("farandole run", "farandole", []),
        ("farandole run", "gloo", []),
        ("torchrun", "farandole", ["farandole.torch"]),
        ("mpirun", "gloo", ["farandole.torch"]),
    ],
)
def test_one_model(script: str, launcher: str, backend: str, modules: list[str]) -> None:
    command = [script, backend, *modules]
    if launcher == "mpirun":
        out = mpirun([sys.executable, *command], 2, PATIENCE).check().out
    elif launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with Process([*run, *command], MPI_ENVIRONMENT) as job:
            out = job.end().check().out
    else:
        out = farandole_run(sys.executable, *command)
    assert out.count("moved by 1.000.") == 2, out  # twice the mean of 0 and 1
    assert ALONE not in out


def test_who_asks_for_it_trains_alone(script: str) -> None:
    env = {"FARANDOLE_RENDEZVOUS": "none"}
    command = [sys.executable, script, "farandole", HVD]
    out = mpirun(command, 2, PATIENCE, env).check().out
    assert out.count("moved by 0.000.") == out.count("moved by 2.000.") == 1, out
    assert ALONE not in out


def test_a_script_that_names_no_farandole_is_left_alone(script: str) -> None:
    """It looks for RANK, which mpirun does not set: as without farandole it finds nothing."""
    out = mpirun([sys.executable, script, "gloo"], 2, PATIENCE).check().out
    assert sorted(out.split("\n")) == ["", "moved by 0.000.", "moved by 2.000."]


def test_children_of_a_rank_get_no_place(mpi_ranks: Start) -> None:
    """With RANK one would pass for another process than its parent's child, and enter MPI. The rank
    itself may import torch's adapter after init()."""
    source = (
        "import os, subprocess, sys\n"
        "import farandole\n"
        "def child(program):\n"
        "    command = [sys.executable, '-c', program + '; farandole.init()']\n"
        "    result = subprocess.run(command, capture_output=True, text=True)\n"
        "    print(result.stdout, result.stderr, flush=True)\n"
        "farandole.init()\n"
        "child('import os, torch, farandole; print(os.getenv(\"RANK\"))')\n"
        "assert 'RANK' not in os.environ\n"
        "import farandole.torch\n"
        "assert os.environ['RANK'] == str(farandole.rank())\n"
        "child('import farandole')\n"
    )
    out = mpi_ranks(source, 2).finish().check().out
    assert len(re.findall(r"ShutdownError: process \d+ is a child of rank", out)) == 4, out
    assert len(re.findall(r"^None", out, re.MULTILINE)) == 2, out


TRAINS = """
import os, torch
{module}
assert "RANK" in os.environ
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 1.0)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_who_meets_nobody_says_so_once(mpi_ranks: Start) -> None:
    source = TRAINS.format(module="import farandole.torch")
    out = mpi_ranks(source, 2).finish().check().out
    said = f"has made an optimizer step {ALONE}"
    for rank in range(2):
        assert len(re.findall(rf"rank {rank} of the 2 of .*, {said}", out)) == 1, out
    assert out.count(ALONE) == 2
    assert "Remedy: call init() of farandole" in out


def one_after_the_other(*commands: list[str]) -> str:
    """The output of two ranks that run these, each in its turn."""
    line = " && ".join(shlex.join(command) for command in commands)
    return mpirun(["sh", "-c", line], 2, PATIENCE).check().out


def test_helpers_say_nothing() -> None:
    shows_help = "import argparse\nimport farandole.torch\nargparse.ArgumentParser().parse_args()"
    alone = "import os\nos.environ['FARANDOLE_RENDEZVOUS'] = 'none'\nimport farandole"
    out = one_after_the_other(
        [sys.executable, "-c", "import farandole"],
        [sys.executable, "-c", shows_help, "--help"],
        [sys.executable, "-c", alone],
        [sys.executable, "-m", "farandole", "config"],
        [FARANDOLE, "config"],
    )
    assert out.count("FARANDOLE_STALL_WARN = ") == 4, out
    assert ALONE not in out
    assert UNUSED not in out


# What no module of Python has started: as Horovod does, or petsc4py.
LIBMPI = """
import atexit, ctypes, re, sys
from pathlib import Path
from mpi4py import rc
rc.initialize = False
import mpi4py.MPI
del sys.modules["mpi4py.MPI"]
maps = Path("/proc/self/maps").read_text()
library = ctypes.CDLL(re.search(r"/.*/libmpi.so.*", maps)[0])
library.MPI_Init(None, None)
atexit.register(library.MPI_Finalize)
"""
QUIET = (
    TRAINS.format(module="import farandole.torch" + LIBMPI),
    "import farandole\nfrom mpi4py import MPI\nassert MPI.COMM_WORLD.Get_size() == 2",
    "import farandole\nfarandole.init()\nfarandole.shutdown()",
)


@pytest.mark.parametrize("program", QUIET)
def test_who_meets_the_others_says_nothing(mpi_ranks: Start, program: str) -> None:
    out = mpi_ranks(program, 2).finish().check().out
    assert ALONE not in out
    assert UNUSED not in out


@pytest.mark.parametrize(
    ("program", "times"),
    [
        ("farandole.init()", 2),
        ("farandole.init()\nif farandole.rank() == 0: farandole.shutdown()", 1),
        ("farandole.init()\nfarandole.barrier()", 0),
        ("farandole.init()\nraise ValueError(farandole.rank())", 0),
    ],
)
def test_a_rank_that_makes_no_call_says_so_at_its_end(
    mpi_ranks: Start, program: str, times: int
) -> None:
    """Its script may have forgotten the optimizer."""
    out = mpi_ranks(f"import farandole\n{program}", 2).finish().out
    assert out.count(UNUSED) == times, out
    assert times == 0 or f"rank 1 of 2 {UNUSED}. If it" in out
    assert times == 0 or "Remedy: wrap the optimizer in DistributedOptimizer" in out


def test_ranks_of_an_elastic_job_share_the_cores(tmp_path: Path) -> None:
    path = tmp_path / "threads.py"
    path.write_text(
        "import os, farandole\n"
        "farandole.init()\n"
        "farandole.barrier()\n"
        "print(f'{os.environ[\"OMP_NUM_THREADS\"]} threads.', flush=True)\n"
    )
    cores = len(os.sched_getaffinity(0))
    out = farandole_run("--elastic", sys.executable, str(path))
    assert out.count(f"{max(1, cores // 2)} threads.") == 2, out
    out = farandole_run("--elastic", "-x", "OMP_NUM_THREADS=7", sys.executable, str(path))
    assert out.count("7 threads.") == 2, out
