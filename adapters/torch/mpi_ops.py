# SPDX-License-Identifier: Apache-2.0
"""All collectives on torch tensors, with Horovod's signatures.

If this adapter has a differentiable version of a collective, that version is exported, otherwise
farandole's own. All of them may be called from any thread.
"""

from __future__ import annotations

from typing import Any, TypeVar

from farandole import shared as _shared
from farandole.calls.handles import Handle
from farandole.errors import FarandoleError as HorovodInternalError
from farandole.ops import barrier
from farandole.shared import *  # noqa: F403
from farandole.shared import __all__ as __all__  # mypy reads this list, Python the one below
from farandole.torch import kind as _kind  # noqa: F401 (registers torch tensors)
from farandole.torch.collectives.exchange import (
    allgather,
    alltoall,
    alltoall_async,
    broadcast,
    grouped_allgather,
)
from farandole.torch.collectives.parts import grouped_reducescatter, reducescatter
from farandole.torch.collectives.reductions import allreduce, grouped_allreduce
from farandole.torch.collectives.sparse import sparse_allreduce_async
from farandole.torch.memory import empty

__all__ = [  # noqa: F811
    *_shared.__all__,
    "HorovodInternalError",
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
    "poll",
    "reducescatter",
    "sparse_allreduce_async",
    "synchronize",
]

T = TypeVar("T")


def poll(handle: Handle[Any]) -> bool:
    """Returns True if an asynchronous call is done. Does not wait.

    Raises ValueError if `handle` is not a handle.

    Examples:
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> hvd.poll(handle) in (True, False)
        True
        >>> hvd.synchronize(handle)
        tensor([1., 1.])
    """
    return _checked(handle).poll()


def synchronize(handle: Handle[T]) -> T:
    """Blocks until an asynchronous call is done, then returns its result or raises its error.

    You may wait for the same handle again, and you get the same result. Raises ValueError if
    `handle` is not a handle.

    Examples:
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
        tensor([1., 1.])
    """
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not a handle of an asynchronous call")
    return handle
