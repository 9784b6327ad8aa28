# SPDX-License-Identifier: Apache-2.0
"""Public calls with which Horovod programs query this build and this run, such as nccl_built()."""

from __future__ import annotations

from farandole.installed import gpu_count, nccl_version
from farandole.runtime import current_bootstrap
from farandole.start.mpi_ranks import Mpi


def mpi_enabled() -> bool:
    """Returns True if the ranks found each other through MPI. Never raises.

    Examples:
        >>> hvd.mpi_enabled() or hvd.size() == 1
        True
    """
    return isinstance(current_bootstrap(), Mpi)


def mpi_threads_supported() -> bool:
    """Returns True if several threads may call MPI. Raises ValueError if MPI is not in use.

    Examples:
        >>> not hvd.mpi_enabled() or hvd.mpi_threads_supported()
        True
    """
    job = current_bootstrap()
    if not isinstance(job, Mpi):
        raise ValueError("MPI is not in use: call init() first, or start the job with MPI")
    return job.threads_supported()


def mpi_built() -> bool:
    """Returns True, because farandole finds MPI at run time.

    Examples:
        >>> hvd.mpi_built()
        True
    """
    return True


def nccl_built() -> int:
    """Returns the version code of the installed NCCL, such as 22707, or 0 without a GPU or NCCL.

    Examples:
        >>> hvd.nccl_built() == 0 or hvd.cuda_built()
        True
    """
    return nccl_version() if gpu_count() else 0


def cuda_built() -> bool:
    """Returns True if this process can use a GPU. farandole finds the driver at run time.

    Examples:
        >>> hvd.cuda_built() in (True, False)
        True
    """
    return gpu_count() > 0


def gloo_enabled() -> bool:
    """Returns False, because farandole has its own shared-memory backend.

    Examples:
        >>> hvd.gloo_enabled()
        False
    """
    return False


def gloo_built() -> bool:
    """Returns False, because farandole has its own shared-memory backend.

    Examples:
        >>> hvd.gloo_built()
        False
    """
    return False


def rocm_built() -> bool:
    """Returns False, because farandole has no ROCm backend.

    Examples:
        >>> hvd.rocm_built()
        False
    """
    return False


def ddl_built() -> bool:
    """Returns False, because farandole does not support IBM DDL.

    Examples:
        >>> hvd.ddl_built()
        False
    """
    return False


def ccl_built() -> bool:
    """Returns False, because farandole does not use oneCCL.

    Examples:
        >>> hvd.ccl_built()
        False
    """
    return False
