# SPDX-License-Identifier: Apache-2.0
"""Allreduce for data-parallel training under mpirun: the framework-neutral calls.

Horovod users change one line: `import farandole.torch as hvd`; `farandole.numpy` needs no
framework. The calls here take arrays of every kind and return arrays of the same kind.
"""

from farandole import ops
from farandole._library import lib, text
from farandole.arrays.arena import empty
from farandole.calls.handles import Handle
from farandole.config import config
from farandole.errors import (
    CheckpointError,
    FarandoleError,
    LibraryError,
    MismatchError,
    PeerError,
    ShutdownError,
    StallError,
)
from farandole.extras.parameter_server import ParameterServer
from farandole.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from farandole.launch.function import run
from farandole.messages import recv, recv_async, send, send_async
from farandole.objects import allgather_object, broadcast_object
from farandole.observe.metrics import Histogram, Metrics, Straggler, log_metrics, metrics
from farandole.observe.timeline import start_timeline, stop_timeline
from farandole.ops import *  # noqa: F403
from farandole.ops import __all__ as __all__  # for mypy, as the last line is for others
from farandole.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.runtime import init, shutdown
from farandole.start import unmet as _unmet
from farandole.topology import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)

__version__ = text(lib.farandole_version())
_unmet.watch()

__all__ = [  # noqa: F811
    "CheckpointError",
    "FarandoleError",
    "Handle",
    "Histogram",
    "LibraryError",
    "Metrics",
    "MismatchError",
    "ParameterServer",
    "PeerError",
    "ProcessSet",
    "ShutdownError",
    "StallError",
    "Straggler",
    "__version__",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "config",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "log_metrics",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "recv",
    "recv_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "send",
    "send_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
__all__ += ops.__all__


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
