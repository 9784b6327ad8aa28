# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients are sent in a shorter dtype, by any class with these two methods. For
users, and for collectives.py; inside tf.function too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _Identity:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Cast:
    """Sends floats in a shorter dtype; the sum itself is taken in float32."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating or tensor.dtype.size <= self.dtype.size:
            return tensor, None
        return tf.cast(tensor, self.dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression({self.dtype.name})"


class Compression:
    """The compressors that come with farandole.tensorflow: none, fp16 and bf16."""

    none = _Identity
    fp16 = _Cast(tf.float16)
    bf16 = _Cast(tf.bfloat16)
