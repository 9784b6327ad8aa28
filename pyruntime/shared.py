# SPDX-License-Identifier: Apache-2.0
"""The public names that the packages of all frameworks have in common."""

from farandole import adasum as _adasum  # noqa: F401  # registers op=Adasum
from farandole._library import lib, text
from farandole.agreement import same_on_all_ranks
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
from farandole.observe.metrics import Histogram, Metrics, Straggler, metrics
from farandole.observe.timeline import start_timeline, stop_timeline
from farandole.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    reducescatter_async,
)
from farandole.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.runtime import init, shutdown
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

__all__ = [
    "Adasum",
    "Average",
    "CheckpointError",
    "FarandoleError",
    "Handle",
    "Histogram",
    "LibraryError",
    "Max",
    "Metrics",
    "Min",
    "MismatchError",
    "ParameterServer",
    "PeerError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "ShutdownError",
    "StallError",
    "Straggler",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather_async",
    "allgather_object",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "config",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather_async",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "recv",
    "recv_async",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "same_on_all_ranks",
    "send",
    "send_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
