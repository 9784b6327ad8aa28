# SPDX-License-Identifier: Apache-2.0
"""What went wrong first, in words, from the flight recorders of all ranks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from farandole.errors import from_code
from farandole.observe.flight_calls import Call, Shared, calls_of, members_of, shared_calls

__all__ = ["explain"]

Page = dict[str, Any]
_MOST = 10  # lines about one kind of trouble


def explain(pages: Sequence[Page]) -> list[str]:
    """Lines: the ranks, what went wrong first, and everything else that waits or failed."""
    shared = shared_calls(pages)
    lines = list(_ranks(pages))
    findings = [
        *_deaths(pages),
        *_mismatches(shared),
        *(text for kind, text in _failures(pages) if kind != "StallError"),
        *_waiting(pages, shared),
        *(text for kind, text in _failures(pages) if kind == "StallError"),
        *_unfinished(shared),
    ]
    if not findings:
        done = sum(1 for one in shared if all(c.state == "done" for c in one.calls.values()))
        return [*lines, f"Nothing went wrong: {done} recorded calls are done on all ranks."]
    lines.append(f"First: {findings[0]}")
    lines += [f"Also: {text}" for text in findings[1 : _MOST + 1]]
    if len(findings) > _MOST + 1:
        lines.append(f"... and {len(findings) - _MOST - 1} more findings")
    return lines


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"


def _join(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ranks(pages: Sequence[Page]) -> Iterator[str]:
    size = pages[0]["size"]
    yield f"{len(pages)} of {size} ranks recorded."
    if missing := sorted(set(range(size)) - {page["rank"] for page in pages}):
        yield f"No dump of {_join(missing)}: on another host, or nobody lived to write it."
    for page in pages:
        last = page["events"][-1] if page["events"] else None
        age = f", last event {_seconds(page['now_ns'] - last['t'])} before the dump" if last else ""
        yield f"  rank {page['rank']} (pid {page['pid']} on {page['host']}): {page['state']}{age}"


def _last_word(page: Page) -> str:
    calls = [call for call in calls_of(page) if call.submitted]
    if not calls:
        return "it never submitted anything"
    last = max(calls, key=lambda call: call.submitted)
    return f"the last thing it submitted was {last} ({last.state})"


def _deaths(pages: Sequence[Page]) -> Iterator[str]:
    died: dict[int, int] = {}
    for page in pages:
        for event in page["events"]:
            if event["kind"] == "peer died":
                died[event["value"]] = min(event["t"], died.get(event["value"], event["t"]))
    known = {page["rank"]: page for page in pages}
    for rank in sorted(died, key=lambda rank: died[rank]):
        own = known.get(rank)
        yield f"rank {rank} died" + (f"; {_last_word(own)}." if own else ".")


def _terms(call: Call) -> dict[str, object]:
    shape: object = call.shape
    if call.shape and call.op in {"allgather", "alltoall"}:
        shape = ("*", *call.shape[1:])
    return {"operation": call.op, "dtype": call.dtype, "shape": shape}


def _mismatches(shared: Sequence[Shared]) -> Iterator[str]:
    for one in shared:
        calls = [call for call in one.calls.values() if call.shape is not None]
        for what in ("operation", "dtype", "shape"):
            opinions: dict[str, list[int]] = {}
            for call in calls:
                opinions.setdefault(str(_terms(call)[what]), []).append(call.rank)
            if len(opinions) > 1:
                text = ", ".join(f"{value} on {_join(r)}" for value, r in sorted(opinions.items()))
                yield f"the ranks disagree about {calls[0]}: {what} is {text}."
                break


def _failures(pages: Sequence[Page]) -> Iterator[tuple[str, str]]:
    """(error class, text); a stall's text goes on with stacks, which are left out."""
    found: dict[tuple[str, str], list[int]] = {}
    for page in pages:
        if failure := page.get("failure"):
            kind = type(from_code(failure["code"], "")).__name__
            found.setdefault((kind, failure["text"].splitlines()[0]), []).append(page["rank"])
    for (kind, text), ranks in found.items():
        yield kind, f"{_join(ranks)} failed with {kind}: {text}"


def _waiting(pages: Sequence[Page], shared: Sequence[Shared]) -> Iterator[str]:
    """Calls that some members never submitted."""
    known = {page["rank"]: page for page in pages}
    pending = [one for one in shared if not one.negotiated]
    # What most ranks wait for comes first: those who lack it are the odd ones out.
    for one in sorted(pending, key=lambda one: -len(one.calls)):
        waiting = sorted(r for r, call in one.calls.items() if call.state == "submitted")
        gave_up = sorted(r for r, call in one.calls.items() if call.state == "failed")
        members = members_of(pages, one.first.process_set)
        missing = [rank for rank in members if rank not in one.calls]
        if not missing:
            continue
        since = max(known[rank]["now_ns"] for rank in one.calls) - one.first.submitted
        verb = "waits" if waiting else "waited"
        text = f"{_join(waiting or gave_up)} {verb} {_seconds(since)} for {one.first}"
        text += f"; {_join(missing)} never submitted it"
        for rank in missing[:3]:
            if rank in known:
                text += f"; of rank {rank}: {_last_word(known[rank])}{_near(one, pending, rank)}"
        yield text if text.endswith("?") else text + "."


def _near(one: Shared, pending: Sequence[Shared], rank: int) -> str:
    """A name that only the missing rank waits for may be the same tensor misspelt."""
    others = [p.first.name for p in pending if rank in p.calls and p.first.name]
    near = difflib.get_close_matches(one.first.name, others, n=1, cutoff=0.6)
    return f", and it waits for '{near[0]}': is it the same tensor?" if near else ""


def _unfinished(shared: Sequence[Shared]) -> Iterator[str]:
    for one in shared:
        stuck = {rank: call for rank, call in one.calls.items() if call.state in _STUCK}
        if one.negotiated and stuck:
            where = ", ".join(f"{stuck[rank].state} on rank {rank}" for rank in sorted(stuck))
            yield f"{one.first} was agreed on by all, but is not done: {where}."


_STUCK = {"negotiated", "moving"}
