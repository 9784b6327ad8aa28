# SPDX-License-Identifier: Apache-2.0
"""Allreduce for data-parallel training under mpirun: the framework-neutral calls.

Horovod users change one line: `import farandole.torch as hvd`; `farandole.numpy` needs no
framework. The calls here take arrays of every kind and return arrays of the same kind.
"""

from farandole import shared as _shared
from farandole.arrays.arena import empty
from farandole.ops import (
    allgather,
    allreduce,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from farandole.shared import *  # noqa: F403
from farandole.shared import __all__ as __all__  # for mypy, as the list below is for others
from farandole.shared import __version__ as __version__
from farandole.start import unmet as _unmet

_unmet.watch()

__all__ = [  # noqa: F811
    *_shared.__all__,
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "empty",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
