# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays as an array kind: the neutral calls use it, on the caller's thread. Importing this
module registers it."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np

from farandole.arrays.buffers import Buffer, NumpyKind
from farandole.arrays.kinds import Shape, register

_ALIGNED = 64  # bytes: JAX takes a NumPy array as its own, without a copy, if it begins there


class JaxKind(NumpyKind):
    """Arrays on one CPU device, which are only read; results are new arrays on the same device."""

    def matches(self, x: Any) -> bool:
        """Whether `x` is an array of JAX."""
        return isinstance(x, jax.Array)

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        """`x` as a NumPy array over its memory, once computed. Also takes what empty() has made.

        Raises TypeError for what is traced, ValueError for what is elsewhere or deleted.
        """
        if isinstance(x, np.ndarray):
            return x
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                "an array is traced (by jit, grad or vmap) and has no values yet: call the "
                "function of farandole.jax, which works within them, or call from outside"
            )
        if x.is_deleted():
            raise ValueError(
                "an array was deleted, or donated to a program: pass what that program returned"
            )
        if len(x.sharding.device_set) > 1 or next(iter(x.sharding.device_set)).platform != "cpu":
            raise ValueError(
                f"an array is on {sorted(map(str, x.sharding.device_set))}: this call takes JAX's "
                "arrays on one CPU device. Remedy: the functions of farandole.jax take those on a "
                "GPU, or copy it by np.asarray(x)"
            )
        return np.asarray(x)

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """The memory of `x`, or of a contiguous copy. In place it raises ValueError."""
        if in_place and isinstance(x, jax.Array):
            raise ValueError("JAX's arrays can't be changed in place: use the out-of-place call")
        return super().describe(x, in_place)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """A NumPy array, aligned so that sealed() turns it into one of JAX without a copy."""
        shape = like.shape if shape is None else shape
        nbytes = prod(shape) * like.dtype.itemsize
        memory = np.empty(nbytes + _ALIGNED, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNED
        return memory[start : start + nbytes].view(like.dtype).reshape(shape)

    def sealed(self, result: Any, like: Any) -> Any:
        """The array of JAX for what empty() has made, on the devices of `like`."""
        return jax.device_put(result, like.sharding if like.committed else None, may_alias=True)

    def wrap(self, memory: Any, like: Any) -> Any:
        """An array of JAX, of `like`'s dtype, over a result's memory."""
        return self.sealed(np.asarray(memory).view(like.dtype), like)


register(JaxKind())
