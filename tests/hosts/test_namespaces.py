# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine that namespaces keep apart, as containers do: those whose sockets and memory
are out of reach count as other hosts, whatever MPI and the host's name say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.hosts_job import Start
from harness.mpirun import mpirun

# A rank moves into the network that argv[1] names for it, once MPI runs: to start, it needs its
# launcher's sockets where it was.
PROGRAM = """
import ctypes, os, sys
import numpy as np
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
CLONE_NEWNET = 0x40000000
if networks := sys.argv[1].split(",")[:-1]:
    network = os.open("/run/netns/" + networks[rank], os.O_RDONLY)
    assert ctypes.CDLL(None).setns(network, CLONE_NEWNET) == 0
import farandole as fd
fd.init()
size = fd.size()
for elements in (10, 300_000):
    for step in range(5):
        y = fd.allreduce(np.full(elements, rank + step, np.float32), op=fd.Sum, name="grad")
        assert (y == size * step + size * (size - 1) / 2).all()
print(f"rank {rank} is {fd.local_rank()} of {fd.local_size()} on {os.uname().nodename}")
fd.shutdown()
"""


def places(
    folder: Path, networks: str, *before: str, env: Mapping[str, str] | None = None, ranks: int = 3
) -> list[str]:
    """Where `ranks` ranks find themselves, each in its one of `networks`."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    argv = [*before, sys.executable, str(program), networks]
    result = mpirun(argv, ranks, 120, env).check()
    found = sorted(re.findall(r"rank (\d+) is (\d) of (\d)", result.out))
    assert len(found) == ranks, result.out
    return ["/".join(place[1:]) for place in found]


def test_one_network(tmp_path: Path) -> None:
    assert places(tmp_path, "") == ["0/3", "1/3", "2/3"]


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        ([0, 1, 0, 0], ["0/3", "0/1", "1/3", "2/3"]),
        ([1, 0, 0, 0], ["0/1", "0/3", "1/3", "2/3"]),
        ([0, 0, 1, 2], ["0/2", "1/2", "0/1", "0/1"]),
    ],
    ids=["member", "leader", "two"],
)
def test_networks_of_their_own(
    start: Start, tmp_path: Path, networks: list[int], expected: list[str]
) -> None:
    names = start.hosts([1, 1, 1]).names
    assert places(tmp_path, "".join(f"{names[i]}," for i in networks), ranks=4) == expected


own_processes = pytest.mark.skipif(
    subprocess.run(["unshare", "-p", "-m", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs unshare --pid --mount (root)",
)
UNSHARE = "unshare -p -m --fork --kill-child --mount-proc"


@own_processes
def test_processes_and_files_of_their_own(tmp_path: Path) -> None:
    """Of one rank, which shares memory all the same: it has no name; deaths are told by sockets."""
    inside = f'test "$OMPI_COMM_WORLD_RANK" = 1 || exec "$@"; exec {UNSHARE} "$@"'
    assert places(tmp_path, "", "sh", "-c", inside, "sh") == ["0/3", "1/3", "2/3"]


@own_processes
def test_a_container_for_each_rank(tmp_path: Path) -> None:
    """All are process 1, with which Open MPI's transport for shared memory crashes; ours works."""
    env = {"OMPI_MCA_btl": "^sm"}
    assert places(tmp_path, "", *UNSHARE.split(), env=env) == ["0/3", "1/3", "2/3"]
