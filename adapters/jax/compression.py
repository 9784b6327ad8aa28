# SPDX-License-Identifier: Apache-2.0
"""Compression for JAX: sends gradients in a shorter dtype, outside and within jit."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from farandole.compression import Cast, Identity


def _shortens(array: Any, dtype: Any) -> bool:
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return bool(floating and array.dtype.itemsize > dtype.itemsize)


def _cast(array: Any, dtype: Any) -> Any:
    return array.astype(dtype)


class Compression:
    """The built-in compressors: none, fp16 and bf16."""

    none = Identity
    fp16 = Cast(jnp.dtype(jnp.float16), _shortens, _cast)
    bf16 = Cast(jnp.dtype(jnp.bfloat16), _shortens, _cast)
