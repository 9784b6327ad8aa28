# SPDX-License-Identifier: Apache-2.0
"""Python objects of any size across ranks, as pickled bytes."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from farandole import topology
from farandole.ops import allgather, broadcast_
from farandole.process_sets import ProcessSet, global_process_set, set_id
from farandole.requests import Call, Op, refuse

__all__ = ["allgather_object", "broadcast_object"]

_HEADER = 8  # bytes: the length of one rank's pickle, little-endian


def _pickled(obj: Any, call: Call) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 (bytes,). An object that cannot be pickled fails on all ranks of `call`."""
    try:
        return np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    except Exception as reason:
        refuse(call, 1, reason)
        raise


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank; the root gets its own back. Any size, over 2 GiB too.

    Raises what pickling raises, on the root; its peers raise too. Errors as in farandole.broadcast.
    """
    length_name, bytes_name = (f"{name}.length", f"{name}.bytes") if name else (None, None)
    is_root = topology.rank() == root_rank
    call = Call(Op.BROADCAST, length_name, set_id(process_set), root=root_rank)
    data = _pickled(obj, call) if is_root else np.empty(0, np.uint8)
    length = np.array([data.size], np.int64)
    broadcast_(length, root_rank, name=length_name, process_set=process_set)
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    elif not data.flags.writeable:  # only read on the root: in place spares a copy of gigabytes
        data = np.asarray(memoryview(bytearray(data)))
    broadcast_(data, root_rank, name=bytes_name, process_set=process_set)
    return obj if is_root else pickle.loads(data.data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order. Any size. Errors as in farandole.allgather."""
    data = _pickled(obj, Call(Op.ALLGATHER, name, set_id(process_set)))
    header = np.frombuffer(len(data).to_bytes(_HEADER, "little"), np.uint8)
    packed = allgather(np.concatenate([header, data]), name=name, process_set=process_set).data
    objects, at = [], 0
    while at < len(packed):
        begin = at + _HEADER
        at = begin + int.from_bytes(packed[at:begin], "little")
        objects.append(pickle.loads(packed[begin:at]))
    return objects
