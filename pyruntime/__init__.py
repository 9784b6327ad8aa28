# SPDX-License-Identifier: Apache-2.0
"""The package `farandole`: collectives on arrays of any framework.

Each call takes NumPy, CuPy, torch, JAX or other arrays, and returns arrays of the same kind.
Horovod users need to change one line: `import farandole.torch as hvd`.
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
from farandole.shared import __all__ as __all__  # mypy reads this list; Python reads the one below
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
    return sorted(__all__)
