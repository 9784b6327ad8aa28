# SPDX-License-Identifier: Apache-2.0
"""What this build and this run can do, by the questions that Horovod's scripts ask."""

from __future__ import annotations

from farandole.gpu_libraries import cards, nccl_version
from farandole.runtime import met_by
from farandole.start.mpi_ranks import Mpi

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_enabled() -> bool:
    """Whether the ranks met through MPI. Never raises."""
    return isinstance(met_by(), Mpi)


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI. ValueError where MPI is not in use."""
    job = met_by()
    if not isinstance(job, Mpi):
        raise ValueError("MPI is not in use: not initialised, or started without MPI")
    return job.threads_supported()


def mpi_built() -> bool:
    """True: MPI is found at run time."""
    return True


def gloo_enabled() -> bool:
    """False: farandole has a host plane of its own."""
    return False


def gloo_built() -> bool:
    """False: farandole has a host plane of its own."""
    return False


def nccl_built() -> int:
    """NCCL's version code (22707 for 2.27.7), as found at run time; 0 without a GPU or NCCL."""
    return nccl_version() if cards() else 0


def cuda_built() -> bool:
    """Whether there is a GPU here whose memory is reduced: the driver is found at run time."""
    return cards() > 0


def rocm_built() -> bool:
    """False: there is no ROCm plane."""
    return False


def ddl_built() -> bool:
    """False: IBM DDL is not supported."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False
