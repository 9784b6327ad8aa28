# SPDX-License-Identifier: Apache-2.0
"""The counters that the core keeps."""

from __future__ import annotations

from farandole._library import check_count, ffi, lib, text

__all__ = ["metrics"]


def metrics() -> dict[str, int]:
    """This rank's counters by name, since init()."""
    count = check_count(lib.farandole_counters(ffi.NULL, 0))
    rows = ffi.new("farandole_counter[]", count)
    check_count(lib.farandole_counters(rows, count))
    return {text(row.name): int(row.value) for row in rows}
