# SPDX-License-Identifier: Apache-2.0
"""HorovodBasics: the calls about ranks, as methods."""

from __future__ import annotations

import farandole

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """A class that libraries instantiate; all instances use the same runtime."""

    Average, Sum, Adasum = farandole.Average, farandole.Sum, farandole.Adasum
    Min, Max, Product = farandole.Min, farandole.Max, farandole.Product

    init = staticmethod(farandole.init)
    shutdown = staticmethod(farandole.shutdown)
    start_timeline = staticmethod(farandole.start_timeline)
    stop_timeline = staticmethod(farandole.stop_timeline)
    is_initialized = staticmethod(farandole.is_initialized)
    is_homogeneous = staticmethod(farandole.is_homogeneous)
    size = staticmethod(farandole.size)
    rank = staticmethod(farandole.rank)
    local_size = staticmethod(farandole.local_size)
    local_rank = staticmethod(farandole.local_rank)
    cross_size = staticmethod(farandole.cross_size)
    cross_rank = staticmethod(farandole.cross_rank)
    mpi_threads_supported = staticmethod(farandole.mpi_threads_supported)
    mpi_enabled = staticmethod(farandole.mpi_enabled)
    mpi_built = staticmethod(farandole.mpi_built)
    gloo_enabled = staticmethod(farandole.gloo_enabled)
    gloo_built = staticmethod(farandole.gloo_built)
    nccl_built = staticmethod(farandole.nccl_built)
    ddl_built = staticmethod(farandole.ddl_built)
    ccl_built = staticmethod(farandole.ccl_built)
    cuda_built = staticmethod(farandole.cuda_built)
    rocm_built = staticmethod(farandole.rocm_built)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """The arguments, which located Horovod's library, are ignored."""
