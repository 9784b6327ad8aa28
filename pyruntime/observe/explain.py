# SPDX-License-Identifier: Apache-2.0
"""Implements `farandole explain`, which finds a job's first failure in the flight recorders."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from farandole.errors import counted, from_code, ranks_text
from farandole.observe.flight import (
    MatchedCall,
    Page,
    RecordedCall,
    calls_of,
    failure_of,
    matched_calls,
    members_of,
    reaches_back_to,
)

_MOST = 10  # most findings that are shown after the first one
# Ranks are never exactly in step, so a call that has waited for less time is not a finding.
_USUAL_NS = 100_000_000


def explain(pages: Sequence[Page]) -> list[str]:
    """Returns the report: the ranks, the first failure, then other failed or waiting calls."""
    shared = matched_calls(pages)
    lines = [*_ranks(pages), *_history(pages)]
    findings = [
        *_deaths(pages),
        *_mismatches(shared),
        *(text for kind, text in _failures(pages) if kind != "StallError"),
        *_found(pages),
        *_waiting(pages, shared),
        *(text for kind, text in _failures(pages) if kind == "StallError"),
        *_unfinished(pages, shared),
    ]
    if not findings:
        done = sum(all(c.state == "done" for c in one.calls.values()) for one in shared)
        text = f"Nothing went wrong: all ranks have finished the last {counted(done, 'call')}"
        young = len(shared) - done
        return [*lines, f"{text}; {young} more under way." if young else f"{text}."]
    lines.append(f"First: {findings[0]}")
    lines += [f"Also: {text}" for text in findings[1 : _MOST + 1]]
    if len(findings) > _MOST + 1:
        lines.append(f"... and {len(findings) - _MOST - 1} more findings")
    return lines


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3f} s"


def _ranks(pages: Sequence[Page]) -> Iterator[str]:
    size = pages[0]["size"]
    world = f", of world {pages[0]['world']}" if pages[0]["world"] > 1 else ""
    yield f"{len(pages)} of {size} ranks recorded{world}."
    if missing := sorted(set(range(size)) - {page["rank"] for page in pages}):
        yield f"No dump of {ranks_text(missing)}: on another host, or no rank lived to write it."
    for page in pages:
        last = page["events"][-1] if page["events"] else None
        age = f", last event {_seconds(page['now_ns'] - last['t'])} before the dump" if last else ""
        yield f"  rank {page['rank']} (pid {page['pid']} on {page['host']}): {page['state']}{age}"


def _history(pages: Sequence[Page]) -> Iterator[str]:
    """Yields lines that tell how elastic training came to this world, from the record of the rank
    that has been running longest."""
    stories = [page.get("story", "").splitlines() for page in pages]
    if longest := max(stories, key=len):
        yield "History of this world:"
        yield from (f"  {line}" for line in longest)
    for page, story in zip(pages, stories, strict=True):
        _, own, said = story[-1].rpartition("; this rank ") if story else ("", "", "")
        if own:
            yield f"  rank {page['rank']} {said}"


def _last_call(page: Page) -> str:
    calls = calls_of(page)
    if not calls:
        return "it never submitted a call"
    last = calls[-1]
    return f"its last call was {last} ({last.state})"


def _deaths(pages: Sequence[Page]) -> Iterator[str]:
    died: dict[int, int] = {}
    for page in pages:
        for event in page["events"]:
            if event["kind"] == "peer died":
                died[event["value"]] = min(event["t"], died.get(event["value"], event["t"]))
    known = {page["rank"]: page for page in pages}
    for rank in sorted(died, key=lambda rank: died[rank]):
        own = known.get(rank)
        yield f"rank {rank} died" + (f"; {_last_call(own)}." if own else ".")


def _terms(call: RecordedCall) -> dict[str, object]:
    shape: object = call.shape
    if call.shape and call.op in {"allgather", "alltoall"}:
        shape = ("*", *call.shape[1:])
    return {"operation": call.op, "dtype": call.dtype, "shape": shape}


def _mismatches(shared: Sequence[MatchedCall]) -> Iterator[str]:
    for one in shared:
        calls = list(one.calls.values())
        for what in ("operation", "dtype", "shape"):
            opinions: dict[str, list[int]] = {}
            for call in calls:
                opinions.setdefault(str(_terms(call)[what]), []).append(call.rank)
            if len(opinions) > 1:
                text = ", ".join(
                    f"{value} on {ranks_text(r)}" for value, r in sorted(opinions.items())
                )
                yield f"the ranks disagree about {calls[0]}: {what} is {text}."
                break


def _found(pages: Sequence[Page]) -> Iterator[str]:
    """Yields findings other than failures. Most are equal on all ranks, so each is shown once."""
    yield from dict.fromkeys(
        f"{text.removesuffix('.')}."
        for page in pages
        for text in page.get("findings", "").splitlines()
    )


def _failures(pages: Sequence[Page]) -> Iterator[tuple[str, str]]:
    """Yields each failure's error class and text, without the stacks that a stall's text has."""
    found: dict[tuple[str, str], list[int]] = {}
    for page in pages:
        if failure := page.get("failure"):
            kind = type(from_code(failure["code"], "")).__name__
            found.setdefault((kind, failure_of(page)), []).append(page["rank"])
    for (kind, text), ranks in found.items():
        yield kind, f"{ranks_text(ranks)} failed with {kind}: {text}"


def _waiting(pages: Sequence[Page], shared: Sequence[MatchedCall]) -> Iterator[str]:
    """Describes calls that some members have not submitted. Yields one line for each combination of
    waiting and missing ranks."""
    known = {page["rank"]: page for page in pages}
    pending = [one for one in shared if not one.negotiated]
    groups: dict[_Waits, list[MatchedCall]] = {}
    # Calls that most ranks have submitted come first, because only a few ranks are missing there.
    for one in sorted(pending, key=lambda one: -len(one.calls)):
        waiting = sorted(r for r, call in one.calls.items() if call.state == "submitted")
        gave_up = sorted(r for r, call in one.calls.items() if call.state == "failed")
        missing = [rank for rank in _wanted(pages, one.first) if rank not in one.calls]
        if not waiting:  # a missing rank may have given up before its oldest recorded event
            missing = [r for r in missing if r not in known or _would_know(known, one.first, r)]
        if not missing or (waiting and _longest(known, one) < _USUAL_NS):
            continue
        verb = "waits" if waiting else "waited"
        waits = _Waits(verb, tuple(waiting or gave_up), tuple(missing), one.first.is_message)
        groups.setdefault(waits, []).append(one)
    for waits, ones in groups.items():
        since = max(_longest(known, one) for one in ones)
        text = f"{ranks_text(waits.ranks)} {waits.verb} {_seconds(since)} for {_all_of(ones)}"
        lacks = "posted the other end" if waits.message else "submitted it"
        lacks = lacks if len(ones) == 1 else "submitted them"
        text += f"; {ranks_text(waits.missing)} never {lacks}"
        for rank in waits.missing[:3]:
            if rank in known:
                hint = _near(ones[0], pending, rank) or _crossed(groups, waits, rank)
                text += f"; of rank {rank}: {_last_call(known[rank])}{hint}"
        yield text if text.endswith("?") else text + "."


class _Waits(NamedTuple):
    verb: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    message: bool


def _longest(known: Mapping[int, Page], one: MatchedCall) -> int:
    return max(_waited_ns(known[rank], call) for rank, call in one.calls.items())


def _all_of(ones: Sequence[MatchedCall]) -> str:
    """Returns the calls' names or, if there are many, their number, as the coordinator does."""
    if len(ones) <= 3:
        return ", ".join(str(one.first) for one in ones)
    names = [one.first.name for one in ones]
    optimizer = ".".join(names[0].split(".")[:2])
    if optimizer.startswith("optimizer.") and all(n.startswith(f"{optimizer}.") for n in names):
        count = sum(name != f"{optimizer}.consensus" for name in names)
        return f"{count} gradients of {optimizer}"
    return f"{len(ones)} calls (the first: {ones[0].first})"


def _crossed(groups: Iterable[_Waits], waits: _Waits, rank: int) -> str:
    if waits.message or not any(
        rank in one.ranks and set(waits.ranks) & set(one.missing) for one in groups
    ):
        return ""
    return (
        f", and it waits for {ranks_text(waits.ranks)} in turn: make the same calls on all ranks "
        "in the same order; uneven data? use join() or drop_last"
    )


def _wanted(pages: Sequence[Page], call: RecordedCall) -> Sequence[int]:
    if call.is_message and call.peer >= 0:
        return [call.peer]
    return members_of(pages, call.process_set)


def _waited_ns(page: Page, call: RecordedCall) -> int:
    return int(call.done or page["now_ns"]) - call.submitted


def _would_know(pages: Mapping[int, Page], call: RecordedCall, rank: int) -> bool:
    """True if the recorded events of `rank` reach back to the time of another rank's call."""
    wall = call.submitted + pages[call.rank]["epoch_minus_monotonic_ns"]
    return reaches_back_to(pages[rank], wall - pages[rank]["epoch_minus_monotonic_ns"])


def _near(one: MatchedCall, pending: Sequence[MatchedCall], rank: int) -> str:
    """Returns a hint if the missing rank waits for a call with a similar name, because one of the
    two names may be misspelled. Otherwise returns ""."""
    if one.first.is_message:
        return ""
    others = [p.first.name for p in pending if rank in p.calls and p.first.name]
    near = difflib.get_close_matches(one.first.name, others, n=1, cutoff=0.6)
    return f", and it waits for '{near[0]}': is it the same tensor?" if near else ""


def _unfinished(pages: Sequence[Page], shared: Sequence[MatchedCall]) -> Iterator[str]:
    known = {page["rank"]: page for page in pages}
    for one in shared:
        stuck = {
            rank: call
            for rank, call in one.calls.items()
            if call.state in _STUCK and _waited_ns(known[rank], call) >= _USUAL_NS
        }
        if one.negotiated and stuck:
            where = ", ".join(f"{stuck[rank].state} on rank {rank}" for rank in sorted(stuck))
            yield f"{one.first} was agreed on by all, but is not done: {where}."


_STUCK = {"submitted", "negotiated", "moving"}
