# SPDX-License-Identifier: Apache-2.0
"""Compression: gradients are sent in a shorter dtype, by any class with these two methods. For
users, and for training.py; within jit too."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp


class _Identity:
    """Sends arrays as they are."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return array, None

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return array


class _Cast:
    """Sends floats in a shorter dtype; the sum itself is taken in float32."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)

    def compress(self, array: Any) -> tuple[Any, Any]:
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        if not floating or array.dtype.itemsize <= self.dtype.itemsize:
            return array, None
        return array.astype(self.dtype), array.dtype

    def decompress(self, array: Any, context: Any) -> Any:
        return array if context is None else array.astype(context)

    def __repr__(self) -> str:
        return f"Compression({self.dtype})"


class Compression:
    """The compressors that come with farandole.jax: none, fp16 and bf16."""

    none = _Identity
    fp16 = _Cast(jnp.float16)
    bf16 = _Cast(jnp.bfloat16)
