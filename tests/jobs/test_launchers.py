# SPDX-License-Identifier: Apache-2.0
"""`farandole run` under launchers of other MPIs and of Slurm, by doubles (harness/launchers.py):
which it takes, what it gives them, and ranks without an MPI that meet all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.launch import commands
from farandole.launch.commands import Srun, find
from farandole.launch.job import Job
from farandole.launch.place import free_port
from farandole.start import launchers, places
from farandole.start.families import FAMILIES, UNKNOWN, family
from harness.launchers import install
from harness.process import ended

OPEN_MPI, CRAY, MPICH = FAMILIES
DOUBLES = {
    "srun": "bin/srun",
    "pals": "pals/bin/mpiexec",
    "other": "bin/mpiexec",
}
NO_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
PROGRAM = """
import numpy as np
import farandole as fd
fd.init()
found = fd.allreduce(np.full(5000, fd.rank() + 1.0), op=fd.Sum)
print(f"rank {fd.rank()} of {fd.size()} {found[-1]}\\n", end="", flush=True)
"""
CHILD = """
import subprocess, sys
import farandole as fd
fd.init()
child = [sys.executable, "-c", "import farandole as fd; fd.init()"]
done = subprocess.run(child, capture_output=True, text=True)
assert "is a child of rank" in done.stderr, done.stderr
fd.shutdown()
fd.init()
"""


def run(launcher: str, ranks: int = 2, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`farandole run` where no MPI can be loaded."""
    program = str(Path(sys.executable).with_name("farandole"))
    line = [program, "run", "-np", str(ranks), "--launcher", launcher, *words]
    return ended([*line, sys.executable, "-c", PROGRAM], **NO_MPI, **env)


def direct(
    double: str, options: list[str], program: str = PROGRAM, **env: str
) -> subprocess.CompletedProcess[str]:
    """The launcher itself, without what `farandole run` tells each rank."""
    return ended([double, *options, sys.executable, "-c", program], **NO_MPI, **env)


def check_sums(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    assert done.returncode == 0, done.stderr
    total = float(sum(range(1, ranks + 1)))
    expected = [f"rank {r} of {ranks} {total}" for r in range(ranks)]
    assert sorted(done.stdout.splitlines()) == expected


def test_ranks_without_mpi_meet(tmp_path: Path) -> None:
    check_sums(run(install(tmp_path, DOUBLES["srun"], "srun"), 3), 3)


@pytest.mark.parametrize("kind", ["pals", "other"])
def test_launchers_that_have_to_be_started_directly(tmp_path: Path, kind: str) -> None:
    double = install(tmp_path, DOUBLES[kind], kind)
    done = run(double)
    assert done.returncode == 2
    assert f"start it directly: `{double} -n 4 python train.py`" in done.stderr


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("srun", ["--ntasks", "2", "--mpi", "none"]),
        ("srun", ["--ntasks", "2", "--mpi", "pmi2"]),
        ("pals", ["-n", "2", "--ppn", "2"]),
    ],
)
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_they_meet_by_the_launchers_own_variables(
    tmp_path: Path, kind: str, options: list[str], nodes: str
) -> None:
    """On two nodes by torch's store, at an address that all derive alike."""
    (tmp_path / "nodes").write_text("localhost\nn2\n")
    told = {"PBS_NODEFILE": str(tmp_path / "nodes")} if kind == "pals" else {}
    double = install(tmp_path, DOUBLES[kind], kind)
    check_sums(direct(double, options, DOUBLE_NODES=nodes, **told), 2)


def test_a_child_of_such_a_rank_is_none(tmp_path: Path) -> None:
    """And the ranks meet again."""
    double = install(tmp_path, DOUBLES["pals"], "pals")
    direct(double, ["-n", "2"], CHILD).check_returncode()


@pytest.mark.parametrize("nodes", [2, 1])
def test_torchrun_below_srun(tmp_path: Path, nodes: int) -> None:
    """Its agents are srun's tasks; where each is alone, two jobs would run in place of one."""
    double = install(tmp_path, DOUBLES["srun"], "srun")
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [f"--nnodes={nodes}", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=7"]
    words += [f"--rdzv-endpoint=localhost:{free_port()}"] if nodes > 1 else ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "program.py")]
    done = ended([double, "--ntasks", "2", "--mpi", "none", *command], **NO_MPI)
    if nodes > 1:
        check_sums(done, 4)
    else:
        assert done.returncode != 0
        assert "but WORLD_SIZE=2 and RANK=" in done.stderr, done.stderr


CHILDREN = """
import multiprocessing, os, sys
import torch.distributed as dist
def train(rank, size, first):
    import farandole.torch
    path = sys.argv[1] if first else f"{sys.argv[1]}-{os.environ['SLURM_PROCID']}"
    first *= int(os.environ["SLURM_PROCID"])
    url = f"file://{path}"
    dist.init_process_group("farandole", init_method=url, rank=first + rank, world_size=size)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)
    dist.barrier()
size, first = int(sys.argv[2]), int(sys.argv[3])
ranks = [multiprocessing.Process(target=train, args=(r, size, first)) for r in range(3)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
    assert rank.exitcode == 0
"""


@pytest.mark.parametrize("one", [True, False])
def test_children_of_several_tasks_say_that_they_are_several_jobs(
    tmp_path: Path, one: bool
) -> None:
    double = install(tmp_path, DOUBLES["srun"], "srun")
    words = [str(tmp_path / "store"), *(["6", "3"] if one else ["3", "0"])]
    command = [sys.executable, "-c", CHILDREN, *words]
    done = ended([double, "--ntasks", "2", "--mpi", "none", *command], **NO_MPI)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 2 of ") == (1 if one else 2)
    told = "srun (SLURM_STEP_NUM_TASKS) started 2 processes, but all 3 ranks of this job"
    assert done.stderr.count(told) == (0 if one else 2), done.stderr


def test_ranks_that_are_told_too_little_are_refused(tmp_path: Path) -> None:
    done = direct(install(tmp_path, DOUBLES["other"], "other"), ["-n", "2"])
    assert done.returncode != 0
    assert "rank" not in done.stdout
    for part in ("started 2 processes, but mpi4py cannot load MPI", "set MASTER_ADDR"):
        assert part in done.stderr


def test_a_pals_that_does_not_tell_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALS_RANKID", "1")
    for name in ("PMI_SIZE", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Exception, match="omit --pmi=none"):
        launchers.check()


# ---- the choice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: x", OPEN_MPI),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", CRAY),
        ("MPICH Version:      5.0.2", MPICH),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", MPICH),
        ("", UNKNOWN),
    ],
)
def test_families(text: str, expected: object) -> None:
    assert family(text) is expected


@pytest.mark.parametrize(
    ("mpi", "plugin"), [(OPEN_MPI, "pmix"), (CRAY, "cray_shasta"), (MPICH, "pmi2")]
)
def test_srun_starts_the_mpi_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpi: object, plugin: str
) -> None:
    monkeypatch.setattr(commands, "_loaded", lambda: mpi)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    double = install(tmp_path, DOUBLES["srun"], "srun")
    for found in (find(), find(double)):
        assert isinstance(found, Srun)
        assert f"--mpi={plugin}" in found.command(Job(("x",), 2))


def test_a_slurm_that_can_not_start_that_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = install(tmp_path, DOUBLES["srun"], "srun")
    monkeypatch.setenv("DOUBLE_PLUGINS", "MPI plugin types are...\n\tnone\n\tpmi2")
    monkeypatch.setattr(commands, "_loaded", lambda: OPEN_MPI)
    with pytest.raises(ValueError, match=r"no --mpi=pmix.*Open MPI.*--launcher mpirun"):
        find(double)
    monkeypatch.setattr(commands, "_loaded", lambda: UNKNOWN)
    assert "--mpi=none" in find(double).command(Job(("x",), 2))


def test_a_port_is_of_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    first = places._port()
    assert first == places._port()
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert first != places._port()
    monkeypatch.delenv("SLURM_STEP_ID")
    assert not places._port()
