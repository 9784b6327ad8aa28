# SPDX-License-Identifier: Apache-2.0
"""Describes JAX arrays to the core, on the caller's thread.

Importing this module registers JaxKind.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import numpy as np

from farandole.arrays.buffers import Buffer, NumpyKind
from farandole.arrays.kinds import Shape, register

_ALIGNED = 64  # bytes: JAX uses a NumPy array without a copy if its address is a multiple of 64


class JaxKind(NumpyKind):
    """Arrays on one CPU device. JAX arrays are read-only. Results are new arrays on that device."""

    def matches(self, x: Any) -> bool:
        """Returns True if `x` is a JAX array."""
        return isinstance(x, jax.Array)

    def view(self, x: Any) -> np.ndarray[Any, Any]:
        """Waits until `x` is computed. Returns a NumPy array that shares the memory of `x`.

        Also accepts the NumPy arrays that empty() returns. Raises TypeError for a traced array, and
        ValueError for an array that is deleted or not on a CPU.
        """
        if isinstance(x, np.ndarray):
            return x
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                "an array is traced (by jit, grad or vmap) and has no values yet: use the function "
                "of farandole.jax, which works while JAX traces, or call outside of the trace"
            )
        if x.is_deleted():
            raise ValueError(
                "an array was deleted, or donated to a program: pass what that program returned"
            )
        if len(x.sharding.device_set) > 1 or next(iter(x.sharding.device_set)).platform != "cpu":
            raise ValueError(
                f"an array is on {sorted(map(str, x.sharding.device_set))}: this call takes JAX "
                "arrays on one CPU device. Remedy: use the functions of farandole.jax, which take "
                "GPU arrays, or copy the array with np.asarray(x)"
            )
        return np.asarray(x)

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Returns the memory of `x`, or of a contiguous copy. Raises ValueError if `in_place`."""
        if in_place and isinstance(x, jax.Array):
            raise ValueError("JAX arrays can't be changed in place: use the out-of-place call")
        return super().describe(x, in_place)

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """Returns a NumPy array that sealed() can turn into a JAX array without a copy."""
        shape = like.shape if shape is None else shape
        nbytes = prod(shape) * like.dtype.itemsize
        memory = np.empty(nbytes + _ALIGNED, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNED
        return memory[start : start + nbytes].view(like.dtype).reshape(shape)

    def sealed(self, result: Any, like: Any) -> Any:
        """Converts empty()'s array to a JAX array on the devices of `like`."""
        return jax.device_put(result, like.sharding if like.committed else None, may_alias=True)

    def wrap(self, memory: Any, like: Any) -> Any:
        """Wraps a result's memory in a JAX array with the dtype of `like`, without copying."""
        return self.sealed(np.asarray(memory).view(like.dtype), like)


register(JaxKind())
