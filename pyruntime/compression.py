# SPDX-License-Identifier: Apache-2.0
"""Compression by a shorter dtype, in any framework: what an adapter's `Compression` is made of. A
compressor is any class with these two methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Identity:
    """Sends arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to send, equal in shape and dtype on all ranks, and what decompress needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The reduced array in its original form."""
        return tensor


class Cast:
    """Sends floats in a shorter dtype; the sum itself is taken in float32."""

    def __init__(
        self, dtype: Any, shortens: Callable[[Any, Any], bool], cast: Callable[[Any, Any], Any]
    ) -> None:
        """`shortens(array, dtype)`: whether the array holds floats that are longer."""
        self.dtype = dtype
        self._shortens = shortens
        self._cast = cast

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """A longer array in the shorter dtype, with its own dtype; any other as it is, with
        None."""
        if not self._shortens(tensor, self.dtype):
            return tensor, None
        return self._cast(tensor, self.dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The reduced array in its original dtype."""
        return tensor if ctx is None else self._cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression({getattr(self.dtype, 'name', self.dtype)})"
