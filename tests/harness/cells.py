# SPDX-License-Identifier: Apache-2.0
"""Tells which calls the ranks of a host have completed among themselves."""

from __future__ import annotations

from farandole.observe import flight

_FIRST = 1 << 62  # see RecordedCall.position
_EVENTS = 4096  # as many as are kept


def count_in_cells(last: int) -> int:
    """How many of this rank's `last` calls were completed in a cell."""
    calls = flight.calls_of(flight.own_page(_EVENTS))
    return sum(call.position >= _FIRST for call in calls[-last:])
