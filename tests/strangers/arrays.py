# SPDX-License-Identifier: Apache-2.0
"""A rank's arrays: of NumPy or torch, in their own memory, shared or not contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import farandole as fd
import farandole.torch as hvd
from strangers.plan import Call
from strangers.program import Array, Tensor, values

__all__ = ["bare", "changed", "make", "refill", "spoil"]


def make(call: Call, rank: int, members: list[int]) -> list[Any]:
    """New arrays with this rank's values."""
    t = call.tensor
    given = [values(t, i, rank, members, call.salt) for i in range(t.count)]
    return [_make(t, t.kinds[rank % len(t.kinds)], value) for value in given]


def _make(t: Tensor, kind: str, value: Array) -> Any:
    if kind == "numpy":
        x = _memory(t, value.shape)
        x[...] = value
        return x
    dtype = getattr(torch, t.dtype)
    source = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape).to(dtype)
    if t.memory == "arena":
        return hvd.empty(tuple(value.shape), dtype=dtype).copy_(source)
    if t.memory == "strided" and value.ndim:
        wide = torch.zeros((*value.shape, 2), dtype=dtype)
        wide[..., 0] = source
        return wide[..., 0]
    return source.clone()


def _memory(t: Tensor, shape: tuple[int, ...]) -> Array:
    if t.memory == "arena":
        return fd.empty(shape, t.dtype)
    if t.memory == "strided" and shape:
        wide: Array = np.zeros((*shape, 2), t.dtype)[..., 0]
        return wide
    return np.empty(shape, t.dtype)


def refill(call: Call, arrays: list[Any], rank: int, members: list[int]) -> None:
    """This rank's values for the arrays of an earlier call of the same tensor."""
    for i, x in enumerate(arrays):
        value = values(call.tensor, i, rank, members, call.salt)
        if isinstance(x, torch.Tensor):
            if x.shape != value.shape:  # others are sent each time
                arrays[i] = _make(call.tensor, "torch", value)
                continue
            x.copy_(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape))
        elif x.shape != value.shape:
            arrays[i] = _make(call.tensor, "numpy", value)
        else:
            x[...] = value


def bare(result: Any) -> list[tuple[str, Array]]:
    """Results as NumPy arrays of their own, with their dtypes' names; bfloat16 as float32."""
    flat = []
    for x in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(x, torch.Tensor):
            dtype = str(x.dtype).removeprefix("torch.")
            x = x.detach().float() if dtype == "bfloat16" else x.detach()
            flat.append((dtype, x.numpy().copy()))
        else:
            array = np.asarray(x)
            flat.append((array.dtype.name, array.copy()))
    return flat


def changed(call: Call, arrays: list[Any], rank: int) -> str:
    """Whether inputs are what they were; what differs."""
    for i, (dtype, array) in enumerate(bare(arrays)):
        value = values(call.tensor, i, rank, list(call.members), call.salt)
        if not np.array_equal(array, value):
            return f"array {i} ({dtype}) is {array.ravel()[:8]}, was {value.ravel()[:8]}"
    return ""


def spoil(arrays: list[Any]) -> bool:
    """What users of torch do to a tensor in flight; whether it still shows the call's result."""
    if not isinstance(arrays[0], torch.Tensor):
        return True
    for x in arrays:
        x.data = torch.zeros(x.shape, dtype=x.dtype)
    return False
