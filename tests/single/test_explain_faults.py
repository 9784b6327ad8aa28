# SPDX-License-Identifier: Apache-2.0
"""What `farandole explain` says of bytes that hardware has changed."""

from __future__ import annotations

from typing import Any

from farandole.observe.explain import explain


def page(rank: int, *faults: tuple[str, int, int]) -> dict[str, Any]:
    """A rank that has found these faults in 'w': kind, element, and who had sent or made it."""
    call = {"call": 7, "name": "w", "op": "allreduce", "set": 0, "dtype": "float32", "bytes": 40}
    call |= {"bucket": 3, "thread": 1}
    events = [
        {**call, "t": 5, "kind": kind, "seq": element, "value": by} for kind, element, by in faults
    ]
    head = {"rank": rank, "size": 3, "world": 1, "pid": 10 + rank, "host": "n", "state": "failed"}
    head |= {"sets": {}, "epoch_minus_monotonic_ns": 0, "now_ns": 9, "began_ns": 0}
    return {**head, "recorded": len(events), "dropped": 0, "events": events, "open": []}


def first(*pages: dict[str, Any]) -> str:
    return next(line for line in explain(pages) if line.startswith("First: "))


def test_a_message_that_came_changed_names_both_ends() -> None:
    text = first(page(0), page(1, ("wire fault", 12, 2)), page(2))
    assert "bytes of allreduce w came from rank 2 changed to rank 1: memory or network" in text
