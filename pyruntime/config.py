# SPDX-License-Identifier: Apache-2.0
"""The settings: every variable the runtime reads, from the core's one table."""

from __future__ import annotations

from dataclasses import dataclass

from farandole._library import check_count, ffi, lib, text

__all__ = ["Variable", "config"]


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    alias: str  # the HOROVOD_ name of the same meaning, or ""
    default: str
    meaning: str
    value: str  # in force now
    job_wide: bool  # rank 0's value holds for all ranks
    source: str  # of the value: "default", "tuning file", "environment" or "rank 0"


def config() -> list[Variable]:
    """All variables with default, meaning and the value in force. Works before init() too."""
    count = check_count(lib.farandole_variables(ffi.NULL, 0))
    rows = ffi.new("farandole_variable[]", count)
    check_count(lib.farandole_variables(rows, count))
    return [
        Variable(
            text(row.name),
            text(row.alias),
            text(row.fallback),
            text(row.meaning),
            text(row.value),
            bool(row.job_wide),
            text(row.source),
        )
        for row in rows
    ]
