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


def test_a_result_that_all_find_wrong_is_its_makers() -> None:
    text = first(*(page(rank, ("audit fault", 12, 2)) for rank in range(3)))
    assert "ranks 0, 1, 2 found element 12 of allreduce w, which rank 2 had reduced" in text
    assert "that rank 2 uses is faulty" in text


def test_a_result_that_one_finds_wrong_may_be_its_own_or_its_makers() -> None:
    text = first(page(0), page(1, ("audit fault", 3, 2)), page(2))
    assert "rank 1 found element 3 of allreduce w" in text
    assert "that rank 1 or rank 2 uses is faulty" in text
