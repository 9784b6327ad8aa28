# SPDX-License-Identifier: Apache-2.0
"""Computes numbers of rows for each member of a process set. A member that has joined sends 0 rows,
and rows that are sent to it get a gradient of zero. Adapters' backward passes use this, on any
thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from farandole.calls.arguments import shown

Table = tuple[int, ...]  # each member's number of rows


def splits_of(splits: Any) -> Table:
    """Returns the numbers of rows that a list, array or tensor on any device holds. Raises
    ValueError for other arguments."""
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
            f"splits is {shown(splits)}, of type {type(splits).__name__}: pass one integer per "
            "member, its number of rows, or None for equal parts"
        )
    return tuple(rows)


def kept(rows: int, members: int) -> list[int]:
    """Returns the number of rows that each member gets from a reducescatter, by the core's rule."""
    return [rows // members + (member < rows % members) for member in range(members)]


def parts(splits: Sequence[int], rows: int, members: int) -> list[int]:
    """Returns each member's number of rows: `splits`, or equal parts if `splits` is empty."""
    return list(splits) or [rows // members] * members


def places(came: Sequence[int], sent: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns which of the sent rows came back, as indices among all sent rows. A member returns
    either all of its rows or none. `came` and `sent` hold numbers of rows for each member."""
    return np.flatnonzero(np.repeat(np.asarray(came) != 0, sent))
