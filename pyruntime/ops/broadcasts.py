# SPDX-License-Identifier: Apache-2.0
"""The public calls for broadcast in all its forms. They may be called from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from farandole.calls.handles import Handle
from farandole.calls.prepared import repeating, repeating_wait
from farandole.calls.public_call import collective, wait_for, waiting
from farandole.calls.requests import Call, Op
from farandole.members import ProcessSet, global_process_set, set_id
from farandole.ops.starts import T, one, start


def _broadcast(
    tensors: Sequence[T],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    timeout: float | None,
    in_place: bool = False,
) -> Handle[list[T]]:
    call = Call(Op.BROADCAST, name, set_id(process_set), root=index(root_rank))
    return start(call, tensors, timeout, in_place)


@repeating
@collective(Op.BROADCAST)
def broadcast_async(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """Sends the array of `root_rank` to every rank.

    Shape and dtype must be equal on all ranks. Returns a handle whose wait() returns a new array of
    the same kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast_async(np.arange(3), root_rank=0).wait()
        array([0, 1, 2])
    """
    return one(_broadcast([tensor], root_rank, name, process_set, timeout))


@waiting(Op.BROADCAST)
@repeating_wait
def broadcast(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """Sends the array of `root_rank` to every rank.

    Shape and dtype must be equal on all ranks. Returns a new array of the same kind.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast(np.arange(3), root_rank=0)
        array([0, 1, 2])
    """
    return wait_for(broadcast_async(tensor, root_rank, name, process_set, timeout=timeout))


@repeating
@collective(Op.BROADCAST)
def broadcast_async_(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[T]:
    """Overwrites the array with the values of `root_rank`, in place.

    The array must be contiguous and writable, and its shape and dtype must be equal on all ranks.
    Do not touch the array until the handle is done. Returns a handle whose wait() returns the same
    array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast_async_(np.arange(3), root_rank=0).wait()
        array([0, 1, 2])
    """
    return one(_broadcast([tensor], root_rank, name, process_set, timeout, True))


@waiting(Op.BROADCAST)
@repeating_wait
def broadcast_(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T:
    """Overwrites the array with the values of `root_rank`, in place.

    The array must be contiguous and writable, and its shape and dtype must be equal on all ranks.
    No other thread may touch the array during the call. Returns the same array.

    - tensor: an array of integers, floats, bool or complex, on a CPU or GPU.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until the wait raises StallError.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast_(np.arange(3), root_rank=0)
        array([0, 1, 2])
    """
    return wait_for(broadcast_async_(tensor, root_rank, name, process_set, timeout=timeout))


@collective(Op.BROADCAST)
def broadcast_list(
    tensors: Sequence[T],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Handle[list[T]]:
    """Broadcasts a list into new arrays, as one call. Adapters use this and wait for the handle."""
    return _broadcast(tensors, root_rank, name, process_set, timeout)
