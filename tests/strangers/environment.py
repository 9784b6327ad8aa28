# SPDX-License-Identifier: Apache-2.0
"""What the variables STRANGERS_* say, and what ranks need under ASan."""

from __future__ import annotations

import os

__all__ = ["environment", "ranks", "seconds", "seed", "shrinking", "without"]


def environment() -> dict[str, str]:
    """Of the ranks; STRANGERS_PRELOAD makes `make test-strangers SANITIZE=address` out of it."""
    found = {}
    if library := os.environ.get("STRANGERS_PRELOAD"):
        found["LD_PRELOAD"] = library
    return found


def seed() -> int:
    """STRANGERS_SEED, of the examples."""
    return int(os.environ.get("STRANGERS_SEED", "0"))


def seconds() -> float:
    """STRANGERS_SECONDS, for all examples of one test at one size."""
    return float(os.environ.get("STRANGERS_SECONDS", "15"))


def shrinking() -> float:
    """STRANGERS_SHRINK: seconds for making a failing program smaller."""
    return float(os.environ.get("STRANGERS_SHRINK", "60"))


def without() -> frozenset[str]:
    """STRANGERS_WITHOUT: features that are not drawn, for a look behind a known defect."""
    return frozenset(filter(None, os.environ.get("STRANGERS_WITHOUT", "").split(",")))


def ranks() -> list[int]:
    """STRANGERS_RANKS, a list of sizes."""
    return [int(size) for size in os.environ.get("STRANGERS_RANKS", "2,3").split(",")]
