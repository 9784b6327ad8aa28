# SPDX-License-Identifier: Apache-2.0
"""What the variables STRANGERS_* say."""

from __future__ import annotations

import os

__all__ = ["ranks", "seconds", "seed", "shrinking"]


def seed() -> int:
    """STRANGERS_SEED, of the examples."""
    return int(os.environ.get("STRANGERS_SEED", "0"))


def seconds() -> float:
    """STRANGERS_SECONDS, for all examples of one test at one size."""
    return float(os.environ.get("STRANGERS_SECONDS", "15"))


def shrinking() -> float:
    """STRANGERS_SHRINK: seconds for making a failing program smaller."""
    return float(os.environ.get("STRANGERS_SHRINK", "30"))


def ranks() -> list[int]:
    """STRANGERS_RANKS, a list of sizes."""
    return [int(size) for size in os.environ.get("STRANGERS_RANKS", "2,3").split(",")]
