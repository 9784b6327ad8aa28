# SPDX-License-Identifier: Apache-2.0
"""Values in nested containers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["map_nested"]


def map_nested(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """`value` with every `kind` in its dicts, lists and tuples changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        items = {k: map_nested(v, kind, change) for k, v in value.items()}
        return (
            defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(v, kind, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_nested(v, kind, change) for v in value)
    return value
