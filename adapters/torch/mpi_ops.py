# SPDX-License-Identifier: Apache-2.0
"""The collectives on torch tensors, with the signatures that Horovod's users know, for any thread.

Synchronous out-of-place calls are differentiable; `x_async` returns a Handle for `poll` and
`synchronize`; a trailing underscore means in place. Calls match across ranks by `name`, unnamed
ones by their order. Errors: those of farandole.ops.
"""

from __future__ import annotations

from typing import Any, TypeVar

from farandole.calls.handles import Handle
from farandole.errors import FarandoleError as HorovodInternalError
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
from farandole.messages import recv, recv_async, send, send_async
from farandole.observe.timeline import start_timeline, stop_timeline
from farandole.ops import Adasum, Average, Max, Min, Product, Sum, barrier, join
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
from farandole.torch import kind as _kind  # noqa: F401 (registers torch tensors)
from farandole.torch.collectives.exchange import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reduce,
    grouped_reduce_,
    grouped_reduce_async,
    grouped_reduce_async_,
    reduce,
    reduce_,
    reduce_async,
    reduce_async_,
)
from farandole.torch.collectives.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from farandole.torch.collectives.scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    scatter,
    scatter_async,
)
from farandole.torch.collectives.sparse import sparse_allreduce_async

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reduce",
    "grouped_reduce_",
    "grouped_reduce_async",
    "grouped_reduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "recv",
    "recv_async",
    "reduce",
    "reduce_",
    "reduce_async",
    "reduce_async_",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

T = TypeVar("T")


def poll(handle: Handle[Any]) -> bool:
    """Whether an asynchronous call is done, without waiting. ValueError for other objects.

    Examples:
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> hvd.poll(handle) in (True, False)
        True
        >>> hvd.synchronize(handle)
        tensor([1., 1.])
    """
    return _checked(handle).poll()


def synchronize(handle: Handle[T]) -> T:
    """Blocks until an asynchronous call is done and returns its result, or raises its error.

    A handle may be waited for again, with the same result. Raises ValueError for other objects.

    Examples:
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
    """
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not a handle of an asynchronous call")
    return handle
