# SPDX-License-Identifier: Apache-2.0
"""Rows by member of a process set. Every table has a place for each member: one that has joined
brings 0 rows, and its derivatives are zeros. For adapters' backward passes, on any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from farandole.calls.arguments import shown

Table = tuple[int, ...]  # rows by member of the set


def splits_of(splits: Any) -> Table:
    """Splits from a list, an array or a tensor on any device."""
    if splits is None:
        return ()
    try:
        rows = splits.tolist() if hasattr(splits, "tolist") else list(splits)
    except (TypeError, ValueError, RuntimeError):
        rows = None
    sound = isinstance(rows, list) and all(
        isinstance(row, int) and not isinstance(row, bool) and abs(row) < 2**63 for row in rows
    )
    if rows is None or not sound:
        raise ValueError(
            f"splits is {shown(splits)}, of type {type(splits).__name__}: pass the rows for each "
            "member, one integer each, or None for equal parts"
        )
    return tuple(rows)


def kept(rows: int, members: int) -> list[int]:
    """The rows that a reducescatter gives each member, by the core's rule."""
    return [rows // members + (member < rows % members) for member in range(members)]


def parts(splits: Sequence[int], rows: int, members: int) -> list[int]:
    """The rows for each member: `splits`, or equal parts if it is empty."""
    return list(splits) or [rows // members] * members


def places(came: Sequence[int], sent: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places, among the rows that were sent, of those that came back: all of a member's, or
    none."""
    return np.flatnonzero(np.repeat(np.asarray(came) != 0, sent))
