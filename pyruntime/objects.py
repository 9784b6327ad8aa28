# SPDX-License-Identifier: Apache-2.0
"""Python objects of any size across ranks, as pickled bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from operator import index
from typing import Any

import cloudpickle
import numpy as np

from farandole import topology
from farandole.calls.door import collective_then
from farandole.calls.requests import Op
from farandole.ops import allgather, broadcast_
from farandole.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]

_HEADER = 8  # bytes: the length of one rank's pickle, little-endian
_LENGTH = "{}.length"


def _pickled(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 (bytes,)."""
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


@collective_then(Op.BROADCAST, _LENGTH)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Any]:
    """The root's object on every rank; the root gets its own back. Any size, over 2 GiB too.

    Raises what pickling raises, on the root; its peers raise too. Errors as in farandole.broadcast.
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
        elif not data.flags.writeable:  # only read on the root: in place spares a copy of gigabytes
            data = np.asarray(memoryview(bytearray(data)))
        broadcast_(data, root, name=bytes_name, process_set=process_set)
        return obj if is_root else pickle.loads(data.data)

    return meet


@collective_then(Op.ALLGATHER)
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], list[Any]]:
    """Every rank's object, in rank order. Any size. Errors as in farandole.allgather.

    Raises what pickling raises, on the rank of that object; its peers raise too.
    """
    data = _pickled(obj)
    header = np.frombuffer(len(data).to_bytes(_HEADER, "little"), np.uint8)
    mine = np.concatenate([header, data])

    def meet() -> list[Any]:
        packed = allgather(mine, name=name, process_set=process_set).data
        objects, at = [], 0
        while at < len(packed):
            begin = at + _HEADER
            at = begin + int.from_bytes(packed[at:begin], "little")
            objects.append(pickle.loads(packed[begin:at]))
        return objects

    return meet
