# SPDX-License-Identifier: Apache-2.0
"""Defines HorovodBasics, a class whose methods are Horovod's calls about ranks."""

from __future__ import annotations

import farandole

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Libraries instantiate this class. All instances share one runtime."""

    Average, Sum, Adasum = farandole.Average, farandole.Sum, farandole.Adasum
    Min, Max, Product = farandole.Min, farandole.Max, farandole.Product

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """Ignores its arguments, which in Horovod give the path of its compiled library."""


_CALLS = (
    "init shutdown start_timeline stop_timeline is_initialized is_homogeneous size rank local_size "
    "local_rank cross_size cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled "
    "gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built"
)
for _name in _CALLS.split():
    setattr(HorovodBasics, _name, staticmethod(getattr(farandole, _name)))
