# SPDX-License-Identifier: Apache-2.0
"""From flight recorder events to calls: what each rank did about one tensor, matched over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Shared", "calls_of", "members_of", "shared_calls"]

Page = dict[str, Any]


@dataclass
class Call:
    """One tensor on one rank. Times are nanoseconds of CLOCK_MONOTONIC, 0 where not (yet) seen."""

    rank: int
    name: str  # "": unnamed
    op: str
    process_set: int
    dtype: str = ""
    shape: tuple[int, ...] | None = None  # None: its submission is not recorded any more
    bytes: int = 0
    order: int = 0  # of unnamed calls in the set
    position: int = 0  # in the coordinator's log, alike on all ranks; 0: not negotiated
    bucket: int = 0
    submitted: int = 0
    negotiated: int = 0
    launched: int = 0
    done: int = 0
    error: int = 0  # code; 0: none

    @property
    def state(self) -> str:
        """How far it came."""
        if self.error:
            return "failed"
        if self.done:
            return "done"
        if self.launched:
            return "moving"
        return "negotiated" if self.negotiated else "submitted"

    def __str__(self) -> str:
        what = f"'{self.name}'" if self.name else f"unnamed call {self.order}"
        return f"{what} ({self.op})"


def calls_of(page: Page) -> list[Call]:
    """One rank's calls, in order of their first recorded event."""
    calls: dict[int, Call] = {}
    launched: dict[tuple[int, int], int] = {}
    for event in page["events"]:
        kind = event["kind"]
        if kind == "launched":
            launched[event["set"], event["bucket"]] = event["t"]
        if "call" not in event:
            continue
        call = calls.get(event["call"])
        if call is None:
            name, op = event["name"], event["op"]
            call = calls[event["call"]] = Call(page["rank"], name, op, event["set"])
        _apply(call, kind, event)
    for call in calls.values():
        if call.bucket:
            call.launched = launched.get((call.process_set, call.bucket), 0)
    return list(calls.values())


def _apply(call: Call, kind: str, event: dict[str, Any]) -> None:
    call.dtype, call.bytes = event["dtype"], event["bytes"]
    if kind == "submit":
        call.submitted, call.order = event["t"], event["seq"]
        call.shape = tuple(event["shape"])
    elif kind == "negotiated":
        call.negotiated, call.position, call.bucket = event["t"], event["seq"], event["bucket"]
    elif kind == "done":
        call.done = event["t"]
    elif kind == "error":
        call.done, call.error = event["t"], event["value"]


@dataclass
class Shared:
    """One call as all recorded ranks saw it."""

    calls: dict[int, Call] = field(default_factory=dict)  # by rank

    @property
    def first(self) -> Call:
        """Of the rank that submitted first."""
        return min(self.calls.values(), key=lambda call: call.submitted or call.negotiated)

    @property
    def negotiated(self) -> bool:
        """Whether all its members have submitted it."""
        return any(call.position for call in self.calls.values())


def shared_calls(pages: Sequence[Page]) -> list[Shared]:
    """Calls matched over ranks: first the negotiated ones as in the log, then those that wait."""
    found: dict[tuple[Any, ...], Shared] = {}
    for page in pages:
        for call in calls_of(page):
            # A name may come back after a failure: failed calls meet in their order.
            key: tuple[Any, ...] = (call.position, call.process_set, call.name, call.order)
            while call.position == 0 and call.rank in found.setdefault(key, Shared()).calls:
                key = (*key, "again")
            found.setdefault(key, Shared()).calls[call.rank] = call
    shared = list(found.values())
    shared.sort(key=_order)
    return shared


def _order(shared: Shared) -> tuple[bool, int, int]:
    first = shared.first
    time = first.submitted or first.negotiated
    if shared.negotiated:
        return False, max(call.position for call in shared.calls.values()), time
    return True, 0, time


def members_of(pages: Sequence[Page], process_set: int) -> list[int]:
    """The ranks of a process set, ascending; those of the world if nobody recorded the set."""
    for page in pages:
        if text := page["sets"].get(str(process_set)):
            return [int(rank) for rank in text.split(",")]
    return list(range(pages[0]["size"]))
