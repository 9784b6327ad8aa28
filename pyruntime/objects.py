# SPDX-License-Identifier: Apache-2.0
"""Broadcast and allgather of Python objects of any size, as pickled bytes. Public calls, for any
thread."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import index
from typing import Any, TypeVar, overload

import cloudpickle
import numpy as np

from farandole import topology
from farandole.calls.public_call import collective_then
from farandole.calls.requests import Op
from farandole.members import ProcessSet, global_process_set
from farandole.ops import allgather, broadcast_

T = TypeVar("T")
_HEADER = 8  # bytes: the length of one rank's pickle, little-endian
_LENGTH = "{}.length"


def _pickled(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pickle as uint8, shape (bytes,)."""
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


@overload
def broadcast_object(
    obj: None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any: ...
@overload
def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@collective_then(Op.BROADCAST, _LENGTH)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """The object of `root_rank` on every rank; the root gets its own back.

    What other ranks pass is not looked at, and may be None. Any size, over 2 GiB too. If pickling
    fails on the root, all ranks raise its error.

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
        length = np.array([data.size], np.int64)
        broadcast_(length, root, name=length_name, process_set=process_set)
        if not is_root:
            data = np.empty(int(length[0]), np.uint8)
        elif not data.flags.writeable:  # the root only reads it, so in place saves a copy
            data = np.asarray(memoryview(bytearray(data)))
        broadcast_(data, root, name=bytes_name, process_set=process_set)
        return obj if is_root else pickle.loads(data.data)

    return meet


@collective_then(Op.ALLGATHER)
def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], list[T]]:
    """Every rank's object, in rank order. Any size.

    If pickling fails on a rank, its error is raised on all ranks.

    Examples:
        >>> hvd.allgather_object("a node's name")
        ["a node's name"]
    """
    data = _pickled(obj)
    header = np.frombuffer(len(data).to_bytes(_HEADER, "little"), np.uint8)
    mine = np.concatenate([header, data])

    def meet() -> list[T]:
        packed = allgather(mine, name=name, process_set=process_set).data
        objects, at = [], 0
        while at < len(packed):
            begin = at + _HEADER
            at = begin + int.from_bytes(packed[at:begin], "little")
            objects.append(pickle.loads(packed[begin:at]))
        return objects

    return meet
