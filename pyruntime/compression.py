# SPDX-License-Identifier: Apache-2.0
"""Casts arrays to a shorter dtype. Adapters build their `Compression` from these classes.

Any class that has the methods compress and decompress can be used as a compressor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Identity:
    """Sends arrays unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array to send and a context for decompress. The array to send must have the
        same dtype and shape on all ranks."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the reduced array in its original form."""
        return tensor


class Cast:
    """Sends floats in a shorter dtype. The core adds such floats in float32."""

    def __init__(
        self, dtype: Any, shortens: Callable[[Any, Any], bool], cast: Callable[[Any, Any], Any]
    ) -> None:
        """`shortens(array, dtype)` returns True if the array holds floats longer than `dtype`."""
        self.dtype = dtype
        self._shortens = shortens
        self._cast = cast

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Returns the cast array and its old dtype, or `tensor` and None if it need not be cast."""
        if not self._shortens(tensor, self.dtype):
            return tensor, None
        return self._cast(tensor, self.dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Casts the reduced array back to its original dtype."""
        return tensor if ctx is None else self._cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression({getattr(self.dtype, 'name', self.dtype)})"
