# SPDX-License-Identifier: Apache-2.0
"""Compression for TensorFlow: sends gradients in a shorter dtype, also inside tf.function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.compression import Cast, Identity


def _shortens(tensor: Any, dtype: Any) -> bool:
    return bool(tensor.dtype.is_floating and tensor.dtype.size > dtype.size)


class Compression:
    """The built-in compressors: none, fp16 and bf16."""

    none = Identity
    fp16 = Cast(tf.float16, _shortens, tf.cast)
    bf16 = Cast(tf.bfloat16, _shortens, tf.cast)
