# SPDX-License-Identifier: Apache-2.0
"""Describes TensorFlow's eager tensors and variables to the core without copying them.

Also converts results to tensors. Importing this module registers TensorFlowKind. May be used from
any thread.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from farandole.arrays.buffers import Buffer, NumpyKind
from farandole.arrays.kinds import Kind, Shape, register

_ALIGNMENT = 64  # in bytes; TensorFlow copies memory that is less aligned
_numpy = NumpyKind()


class NodeArray(np.ndarray[Any, Any]):
    """The NumPy array that TensorFlow passes to a graph node in place of a tensor."""


class TensorFlowKind(Kind):
    """Dense tensors of every dtype that the core supports. GPU tensors are copied to the host."""

    def matches(self, x: Any) -> bool:
        """Returns True if `x` is a tensor, a variable or a node's array."""
        return isinstance(x, (tf.Tensor, tf.Variable, NodeArray))

    def describe(self, x: Any, in_place: bool = False) -> Buffer:
        """Returns the values' memory. Raises ValueError if `in_place`, except for NumPy arrays."""
        if isinstance(x, np.ndarray):  # a node's array, or an array from empty()
            return _numpy.describe(x, in_place)
        if in_place:
            raise ValueError(
                f"a {type(x).__name__} can't be changed in place: use the out-of-place call, or "
                "broadcast_variables"
            )
        return _numpy.describe(_view(x))

    def empty(self, like: Any, shape: Shape | None = None) -> Any:
        """Returns a NumPy array that sealed() can turn into a tensor without a copy."""
        dtype = like.dtype if isinstance(like, np.ndarray) else like.dtype.as_numpy_dtype
        wanted: Any = like.shape if shape is None else shape
        count = prod(wanted) * np.dtype(dtype).itemsize
        memory = np.empty(count + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + count].view(dtype).reshape(tuple(wanted))

    def sealed(self, result: Any, like: Any) -> Any:
        """Converts empty()'s array to a tensor. For a node, returns the array itself."""
        return result if isinstance(like, NodeArray) else to_tensor(result)

    def wrap(self, memory: Any, like: Any) -> Any:
        """Wraps a result's memory, without copying, in a tensor with the dtype of `like`.

        For a node, returns an array instead.
        """
        view = like if isinstance(like, np.ndarray) else _view(like)
        return self.sealed(np.asarray(memory).view(view.dtype), like)


def _view(x: Any) -> np.ndarray[Any, Any]:
    """Returns a NumPy view of an eager tensor or variable, or a copy of a floating-point scalar."""
    value = x.read_value() if isinstance(x, tf.Variable) else x
    if not hasattr(value, "numpy"):
        raise TypeError(
            "a tensor of a graph has no value yet: inside tf.function use the calls of "
            "farandole.tensorflow"
        )
    # NumPy cannot read an ml_dtypes scalar from a tensor.
    alone = value.shape.rank == 0 and value.dtype.is_floating
    return np.asarray(value.numpy() if alone else value)


def to_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Wraps the memory of an array, to which nobody writes any more, in a tensor.

    If DLPack lacks the dtype, for example bfloat16, the tensor is a copy.
    """
    if array.dtype.isbuiltin == 1:  # False for ml_dtypes' dtypes
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


register(TensorFlowKind())
