# SPDX-License-Identifier: Apache-2.0
"""Makes one call of a program by one of farandole's doors: neutral or torch's, one or grouped."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import farandole as fd
import farandole.torch as hvd
from strangers.plan import Call
from strangers.program import op_of, rows_sent

__all__ = ["block", "submit"]


def submit(call: Call, rank: int, process_set: Any, arrays: list[Any], odd: bool = False) -> Any:
    """The handle; `odd`: with what is wrong about this call."""
    if odd:
        assert call.odd is not None
        arrays = [_odd(call.odd[1], x) for x in arrays]
    return _start(call, rank, process_set, arrays, "_async", {})


def block(
    call: Call, rank: int, process_set: Any, arrays: list[Any], timeout: float | None = None
) -> Any:
    """The result, by the form that waits; torch's own takes no timeout, so the neutral one does."""
    options = {} if timeout is None else {"timeout": timeout}
    result = _start(call, rank, process_set, arrays, "", options)
    # A blocking alltoall with splits gives both, as its handle does.
    return list(result) if isinstance(result, tuple) else result


def _start(
    call: Call,
    rank: int,
    process_set: Any,
    arrays: list[Any],
    form: str,
    options: dict[str, Any],
) -> Any:
    t = call.tensor
    by_torch = t.kinds[rank % len(t.kinds)] == "hvd" and not options
    options |= {"name": call.name, "process_set": process_set}
    grouped = "grouped_" if t.count > 1 else ""
    door: Any = hvd if by_torch else fd
    form += "_" if t.in_place else ""
    function = getattr(door, f"{grouped}{t.op}{form}")
    if t.op in ("allreduce", "reducescatter"):
        options["op"] = getattr(fd, op_of(t))
    argument = arrays if grouped else arrays[0]
    if t.op == "broadcast":
        return function(argument, call.active[t.root % len(call.active)], **options)
    if t.op == "alltoall":
        splits = rows_sent(rank, list(call.members), call.salt)
        return function(argument, splits=splits, **options)
    return function(argument, **options)


def _odd(what: str, x: Any) -> Any:
    """Something else than the peers have, or than anybody can send."""
    if what == "none":
        return None
    if what == "text":
        return "text"
    if what == "list":
        return [1.0]
    if what == "longdouble":
        return np.zeros(x.shape, np.longdouble)
    if what == "freed_storage":
        x = x if isinstance(x, torch.Tensor) else torch.from_numpy(x)
        if not x.untyped_storage().resizable():  # borrowed from NumPy: nobody can free it
            x = x.clone()
        x.untyped_storage().resize_(0)
        return x
    if what == "shape":
        shape = tuple(x.shape)
        shape = (*shape[:-1], shape[-1] + 1) if len(shape) > 1 else (*shape, 2)
        return x.new_zeros(shape) if isinstance(x, torch.Tensor) else np.zeros(shape, x.dtype)
    assert what == "dtype"
    if isinstance(x, torch.Tensor):
        return x.to(torch.int32 if x.dtype == torch.float32 else torch.float32)
    return x.astype(np.int32 if x.dtype == np.float32 else np.float32)
