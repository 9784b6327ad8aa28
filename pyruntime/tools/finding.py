# SPDX-License-Identifier: Apache-2.0
"""Findings of `farandole doctor`: the lines of its table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Finding", "Level", "error", "ok", "warning"]


class Level(IntEnum):
    """How bad a finding is."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """One line of the table; `remedy` is empty where nothing is to be done."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """Nothing is to be done."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(name, Level.WARNING, text, remedy)


def error(name: str, text: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(name, Level.ERROR, text, remedy)
