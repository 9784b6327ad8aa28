# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts without MPI: torchrun, or its variables, and farandole's own TCP."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.hosts import SimulatedHosts, simulated_hosts
from harness.process import PATIENCE, JobResult, Process

PORT = "29400"
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import farandole.torch as hvd

try:
    if sys.argv[1] == "backend":
        dist.init_process_group("farandole")
    for attempt in range(2):
        hvd.init()
        x = torch.full((50_000,), hvd.rank() + 1.0)
        total = hvd.allreduce(x, op=hvd.Sum)[-1].item()
        if sys.argv[1] == "backend":
            dist.all_reduce(x)
            assert x[-1].item() == total and dist.get_rank() == hvd.rank()
            dist.destroy_process_group()
        place = f"{hvd.local_rank()}/{hvd.local_size()}"
        print(f"{attempt}: rank {hvd.rank()} of {hvd.size()}, here {place}: {total:g}.", flush=True)
        hvd.shutdown()
        if sys.argv[1] == "backend":
            break
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    raise
"""


# What it is for: tests/single/test_torch_meeting.py.
SECRET = {"FARANDOLE_JOB_SECRET_FILE": "none", "FARANDOLE_JOB_SECRET": "a secret of these tests"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **SECRET}
Commands = Sequence[tuple[int, list[str]]]


def launch(hosts: SimulatedHosts, commands: Commands) -> list[JobResult]:
    """What each command, on its host, ended with."""
    with ExitStack() as stack:
        all_ = [Process(hosts.command(host, argv), ENVIRONMENT) for host, argv in commands]
        jobs = [stack.enter_context(job) for job in all_]
        results = [job.wait(PATIENCE) for job in jobs]
        outputs = [job.output for job in jobs]
    assert all(results), outputs
    return [result for result in results if result]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize("mode", ["plain", "backend"])
def test_torchrun_on_two_hosts(program: str, mode: str, tmp_path: Path) -> None:
    with simulated_hosts(tmp_path, [2, 2]) as hosts:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        launcher += ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=1"]
        launcher += [f"--rdzv-endpoint={hosts.names[0]}:{PORT}", program, mode]
        results = launch(hosts, [(0, launcher), (1, launcher)])
    out = "".join(result.out for result in results)
    assert [result.returncode for result in results] == [0, 0], out
    for attempt in range(2 if mode == "plain" else 1):
        for rank in range(4):
            line = f"{attempt}: rank {rank} of 4, here {rank % 2}/2: 10."
            assert out.count(line) == 1, out


def variables(hosts: SimulatedHosts, rank: int, size: int) -> list[str]:
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found |= {"MASTER_ADDR": hosts.names[0], "MASTER_PORT": PORT, "FARANDOLE_INIT_TIMEOUT": 60}
    return ["env", *(f"{name}={value}" for name, value in found.items())]


def test_variables_on_three_hosts(program: str, tmp_path: Path) -> None:
    with simulated_hosts(tmp_path, [1, 1, 1]) as hosts:
        command = [sys.executable, program, "plain"]
        commands = [(rank, [*variables(hosts, rank, 3), *command]) for rank in range(3)]
        results = launch(hosts, commands)
    out = "".join(result.out for result in results)
    assert [result.returncode for result in results] == [0, 0, 0], out
    for rank in range(3):
        assert out.count(f"0: rank {rank} of 3, here 0/1: 6.") == 1, out
        assert out.count(f"1: rank {rank} of 3, here 0/1: 6.") == 1, out


@pytest.mark.parametrize("absent", [0, 1])
def test_a_host_that_never_comes(program: str, absent: int, tmp_path: Path) -> None:
    with simulated_hosts(tmp_path, [1, 1]) as hosts:
        rank = 1 - absent
        own = [*variables(hosts, rank, 2), "FARANDOLE_INIT_TIMEOUT=2"]
        command = [*own, sys.executable, program, "plain"]
        (result,) = launch(hosts, [(rank, command)])
    assert result.returncode != 0
    text = "no store answers at" if absent == 0 else "init(): rank 1 did not come"
    assert f"StallError: init(): {text.removeprefix('init(): ')}" in result.out, result.out
