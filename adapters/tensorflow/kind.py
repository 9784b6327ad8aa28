# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's eager tensors and variables as an array kind, without a copy; and how results become
tensors. The neutral calls use it, on any thread. Importing this module registers it."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from farandole.arrays.buffers import Buffer, NumpyKind
from farandole.arrays.kinds import Kind, Shape, register

_ALIGNMENT = 64  # bytes; TensorFlow copies memory that is aligned less
_numpy = NumpyKind()


class NodeArray(np.ndarray[Any, Any]):
    """A tensor inside a node of a graph, which TensorFlow shows as a NumPy array."""


class TensorFlowKind(Kind):
    """Dense tensors of every dtype the core knows; those on a GPU are copied to the host."""

    def matches(self, x: Any) -> bool:
        """Whether `x` is a tensor, a variable or an array of a graph's node."""
        return isinstance(x, (tf.Tensor, tf.Variable, NodeArray))

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """The memory of the values of `x`. Raises ValueError in place, but for NumPy's arrays."""
        if isinstance(x, np.ndarray):  # what empty() made, too
            return _numpy.describe(x, in_place)
        if in_place:
            raise ValueError(
                f"a {type(x).__name__} can't be changed in place: use the call that is not in "
                "place, or broadcast_variables"
            )
        return _numpy.describe(_view(x))

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """A NumPy array, aligned so that sealed() makes a tensor of it."""
        dtype = like.dtype if isinstance(like, np.ndarray) else like.dtype.as_numpy_dtype
        wanted: Any = like.shape if shape is None else shape
        count = prod(wanted) * np.dtype(dtype).itemsize
        memory = np.empty(count + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + count].view(dtype).reshape(tuple(wanted))

    def sealed(self, result: Any, like: Any) -> Any:
        """The tensor for what empty() has made; for an array of a node, that array."""
        return result if isinstance(like, NodeArray) else to_tensor(result)

    def wrap(self, memory: Any, like: Any) -> Any:
        """A tensor, of `like`'s dtype, over a result's memory; for an array of a node, an array."""
        view = like if isinstance(like, np.ndarray) else _view(like)
        return self.sealed(np.asarray(memory).view(view.dtype), like)


def _view(x: Any) -> np.ndarray[Any, Any]:
    """The values of an eager tensor or of a variable; without a copy, but for a single one."""
    value = x.read_value() if isinstance(x, tf.Variable) else x
    if not hasattr(value, "numpy"):
        raise TypeError(
            "a tensor of a graph has no value yet: inside tf.function use the calls of "
            "farandole.tensorflow"
        )
    # NumPy takes no single value of ml_dtypes from a tensor.
    alone = value.shape.rank == 0 and value.dtype.is_floating
    return np.asarray(value.numpy() if alone else value)


def to_tensor(array: np.ndarray[Any, Any]) -> Any:
    """A tensor over the memory of an array that nobody writes to any more; copied for types that
    DLPack does not know, such as bfloat16."""
    if array.dtype.isbuiltin == 1:  # not of ml_dtypes
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


register(TensorFlowKind())
