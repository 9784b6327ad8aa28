# SPDX-License-Identifier: Apache-2.0
"""Launchers for tests: ranks under mpirun, and ranks without MPI; every wait has a deadline."""

from harness.fork import ForkJob, fork_run
from harness.mpirun import MpiJob, mpirun
from harness.process import JobError, JobResult

__all__ = ["ForkJob", "JobError", "JobResult", "MpiJob", "fork_run", "mpirun"]
