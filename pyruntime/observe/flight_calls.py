# SPDX-License-Identifier: Apache-2.0
"""Turns flight recorder events into calls and matches them over ranks. For `farandole explain` and
`farandole export`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Page = dict[str, Any]


@dataclass
class Call:
    """One tensor on one rank. Times are nanoseconds of CLOCK_MONOTONIC, 0 if not (yet) seen."""

    rank: int
    name: str  # "": unnamed
    op: str
    process_set: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    order: int = 0  # of unnamed calls in the set
    peer: int = -1  # of a message: the other rank, -1: any
    tag: int = 0
    position: int = 0  # in the coordinator's log, alike on all ranks; 0: not negotiated
    bucket: int = 0
    lane: int = 0  # the process set whose bucket it is: a message's pair
    submitted: int = 0
    negotiated: int = 0
    launched: int = 0
    done: int = 0
    error: int = 0  # code; 0: none

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message, which ranks number as they like."""
        return self.op in ("send", "receive")

    @property
    def state(self) -> str:
        """How far the call came."""
        if self.error:
            return "failed"
        if self.done:
            return "done"
        if self.launched:
            return "moving"
        return "negotiated" if self.negotiated else "submitted"

    def __str__(self) -> str:
        if self.is_message:
            return message_text(self.op, self.name, self.peer, self.tag)
        what = f"'{self.name}'" if self.name else f"unnamed call {self.order}"
        return f"{what} ({self.op})"


def message_text(op: str, name: str, peer: int, tag: int) -> str:
    """One end of a message: "send 'x' to rank 1 with tag 7"."""
    what = f"{op} '{name}'" if name else op
    way = "to" if op == "send" else "from"
    return f"{what} {way} {'any rank' if peer < 0 else f'rank {peer}'} with tag {tag}"


def calls_of(page: Page) -> list[Call]:
    """One rank's calls in order of submission: those that are open, and those in its last events.

    Calls that are over are left out if their submission is older than the events.
    """
    calls: dict[int, Call] = {}
    launched: dict[tuple[int, int], int] = {}

    def apply(kind: str, event: dict[str, Any]) -> Call:
        call = calls.get(event["call"])
        if call is None:
            name, op = event["name"], event["op"]
            call = calls[event["call"]] = Call(page["rank"], name, op, event["set"])
        _apply(call, kind, event)
        return call

    for known in page["open"]:
        call = apply("submit", known)
        if known["position"]:
            call.negotiated, call.position = known["negotiated"], known["position"]
            call.bucket, call.lane = known["agreed_bucket"], known["lane"]
    for event in page["events"]:
        if event["kind"] == "launched":
            launched[event["set"], event["bucket"]] = event["t"]
        if "call" in event:
            apply(event["kind"], event)
    for call in calls.values():
        if call.bucket:
            call.launched = launched.get((call.lane, call.bucket), 0)
    whole = (call for call in calls.values() if call.submitted)
    return sorted(whole, key=lambda call: call.submitted)


def _apply(call: Call, kind: str, event: dict[str, Any]) -> None:
    call.dtype, call.bytes = event["dtype"], event["bytes"]
    if kind == "submit":
        call.submitted, call.order = event["t"], event["seq"]
        call.shape = tuple(event["shape"])
        if call.is_message:
            call.peer, call.tag = event.get("peer", -1), event.get("tag", 0)
    elif kind == "negotiated":
        call.negotiated, call.position, call.bucket = event["t"], event["seq"], event["bucket"]
        call.lane = event["set"]
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
        """The call of the rank that submitted first."""
        return min(self.calls.values(), key=lambda call: call.submitted)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is alike on all ranks and known at its submission."""
        first = self.first
        return first.process_set, first.name, first.order, first.op

    @property
    def negotiated(self) -> bool:
        """Whether all its members have submitted it."""
        return any(call.position for call in self.calls.values())


def shared_calls(pages: Sequence[Page]) -> list[Shared]:
    """Calls matched over ranks: first the negotiated ones in log order, then those that wait."""
    found: dict[tuple[Any, ...], Shared] = {}
    for page in pages:
        for call in calls_of(page):
            # A name may be used again after a failure: failed calls match in their order.
            key: tuple[Any, ...] = (call.position, call.process_set, call.name, call.order)
            if call.is_message:
                key = (call.rank, call.submitted)
            while call.position == 0 and call.rank in found.setdefault(key, Shared()).calls:
                key = (*key, "again")
            found.setdefault(key, Shared()).calls[call.rank] = call
    _join_late_readers(list(found.values()), {page["rank"]: page for page in pages})
    return sorted((shared for shared in found.values() if shared.calls), key=_order)


def _join_late_readers(shared: Sequence[Shared], pages: Mapping[int, Page]) -> None:
    """Moves a call that waits on one rank to the call of others who know already that all agree."""

    def time(rank: int, ns: int) -> int:
        return int(ns + pages[rank]["epoch_minus_monotonic_ns"])

    agreed: dict[tuple[Any, ...], Shared] = {}  # the last one of each name
    for one in sorted((one for one in shared if one.negotiated), key=_order):
        agreed[one.identity] = one
    for one in shared:
        other = agreed.get(one.identity)
        if one.negotiated or other is None or one.first.is_message:
            continue
        began = min(time(rank, call.negotiated) for rank, call in other.calls.items())
        for rank, call in list(one.calls.items()):
            if rank not in other.calls and time(rank, call.submitted) <= began:
                other.calls[rank] = one.calls.pop(rank)


def _order(shared: Shared) -> tuple[bool, int, int]:
    position = max(call.position for call in shared.calls.values())
    return not position, position, shared.first.submitted


def reaches_back_to(page: Page, ns: int) -> bool:
    """Whether a rank's events include all that happened since `ns`, of that rank's clock."""
    kept = page["events"]
    return len(kept) == page["recorded"] or bool(kept and kept[0]["t"] <= ns)


def members_of(pages: Sequence[Page], process_set: int) -> list[int]:
    """The ranks of a process set, ascending; those of the world if nobody recorded the set."""
    for page in pages:
        if text := page["sets"].get(str(process_set)):
            return [int(rank) for rank in text.split(",")]
    return list(range(pages[0]["size"]))
