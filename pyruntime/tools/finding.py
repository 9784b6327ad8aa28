# SPDX-License-Identifier: Apache-2.0
"""Findings: the lines of the table of `farandole doctor`, for its checks and self tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad a finding is."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """One line of the table; `remedy` is empty if nothing is to be done."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """A finding without a problem."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """A finding that makes farandole slower or less robust."""
    return Finding(name, Level.WARNING, text, remedy)


def error(name: str, text: str, remedy: str) -> Finding:
    """A finding with which farandole does not work."""
    return Finding(name, Level.ERROR, text, remedy)
