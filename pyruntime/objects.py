# SPDX-License-Identifier: Apache-2.0
"""Public calls that broadcast and allgather Python objects, as pickled bytes of any size. They may
be called from any thread.

Unpickling runs code, so farandole must not unpickle bytes that somebody has altered between hosts.
Before each pickle, a call of at most 1 KiB announces the pickle's length and digest. Such small
calls travel in control messages, which nobody can forge or replay, because they have a MAC and a
sequence number.
"""

from __future__ import annotations

import hashlib
import pickle
from operator import index
from typing import Any, TypeVar, overload

import cloudpickle
import numpy as np

from farandole import topology
from farandole.calls.public_call import collective, then
from farandole.calls.requests import Op
from farandole.errors import PeerError
from farandole.members import ProcessSet, global_process_set
from farandole.ops import broadcast_
from farandole.ops.gathers import grouped_allgather_rows

T = TypeVar("T")
_LENGTH = "{}.length"
# Numbers of bytes in an announcement, which holds the pickle's length (little-endian) and digest.
_COUNT, _DIGEST = 8, 32

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _between_hosts() -> bool:
    """Returns True if the job spans several hosts. The result is equal on all ranks."""
    return topology.local_size() < topology.size()


def _pickled(obj: Any) -> Bytes:
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


def _digest(data: Bytes) -> bytes:
    """Returns the digest of a pickle. On one host, returns zeros, because only this user's
    processes can reach the bytes there."""
    if not _between_hosts():
        return bytes(_DIGEST)
    return hashlib.blake2b(data.data, digest_size=_DIGEST).digest()


def _head(data: Bytes) -> Bytes:
    return np.frombuffer(bytearray(data.size.to_bytes(_COUNT, "little") + _digest(data)), np.uint8)


def _length(head: Bytes) -> int:
    return int.from_bytes(head[:_COUNT].tobytes(), "little")


def _opened(data: Bytes, head: Bytes, rank: int, call: str, name: str | None) -> Any:
    """Unpickles the object of `rank`. Raises PeerError if its digest is not the announced one."""
    if _digest(data) != head[_COUNT:].tobytes():
        raise PeerError(
            f"{call}{'' if name is None else f' {name!r}'}: the object of rank {rank} was altered "
            "between the hosts, so farandole does not unpickle it; somebody can write to the "
            "network between the hosts: use a private network or a tunnel"
        )
    return pickle.loads(data.data)


@overload
def broadcast_object(
    obj: None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any: ...
@overload
def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> T: ...
@collective(Op.BROADCAST, _LENGTH)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> Any:
    """Sends the object of `root_rank` to every rank and returns it. The root gets its own object.

    Objects may have any size, even over 2 GiB. The `obj` of ranks other than the root is ignored
    and may be None. If pickling fails on the root, all ranks raise the root's error. If somebody
    has altered the object between hosts, the receiver raises PeerError and does not unpickle it.

    - obj: any object that cloudpickle can pickle.
    - root_rank: the sender's rank in the world. It must be a member of the process set.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    length_name, bytes_name = (_LENGTH.format(name), f"{name}.bytes") if name else (None, None)
    root = index(root_rank)
    is_root = topology.rank() == root
    data = _pickled(obj) if is_root else np.empty(0, np.uint8)

    def meet() -> Any:
        nonlocal data
        head = _head(data)
        broadcast_(head, root, name=length_name, process_set=process_set, timeout=timeout)
        if not is_root:
            data = np.empty(_length(head), np.uint8)
        elif not data.flags.writeable:  # broadcast_ accepts only writable arrays
            data = np.asarray(memoryview(bytearray(data)))
        broadcast_(data, root, bytes_name, process_set, timeout=timeout)
        return obj if is_root else _opened(data, head, root, "broadcast_object", name)

    return then(meet)


@collective(Op.ALLGATHER)
def allgather_object(
    obj: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    timeout: float | None = None,
) -> list[T]:
    """Returns every rank's object, of any size, in rank order.

    The list has one entry for each member of the set. The entry is None for a member that has
    joined. If pickling fails on a rank, all ranks raise that rank's error. If somebody has altered
    an object between hosts, the receiving rank does not unpickle it and raises PeerError.

    - obj: any object that cloudpickle can pickle.
    - name, process_set: calls match within this set by name; unnamed calls match by order.
    - timeout: seconds until each wait raises StallError. None means no limit.

    Raises MismatchError, PeerError, StallError, ShutdownError, LibraryError, ValueError, TypeError.

    Examples:
        >>> hvd.allgather_object("a node's name")
        ["a node's name"]
    """
    data = _pickled(obj)
    head = _head(data)

    def parts_of(mine: Bytes, its_name: str | None) -> list[Bytes]:
        """Returns each member's bytes. A member that has joined sends none."""
        common: Any = {"name": its_name, "process_set": process_set, "timeout": timeout}
        ((packed, rows),) = grouped_allgather_rows([mine], **common).wait()
        return np.split(packed, np.cumsum(rows)[:-1])

    def meet() -> list[T]:
        ranks = process_set.ranks or []
        if _between_hosts():
            heads, parts = parts_of(head, name), parts_of(data, name and f"{name}.bytes")
        else:
            heads, parts = [head] * len(ranks), parts_of(data, name)  # all digests are zeros
        found: list[Any] = [
            _opened(part, one, rank, "allgather_object", name) if part.size else None
            for part, one, rank in zip(parts, heads, ranks, strict=True)
        ]
        return found

    return then(meet)
