# SPDX-License-Identifier: Apache-2.0
"""What a seed draws, and how outcomes are judged: no job runs."""

from __future__ import annotations

from typing import Any

import pytest

from harness.wire import Weather
from schedules.outcome import Outcome, Told
from schedules.schedule import (
    BEGIN,
    WIRE,
    Act,
    Fault,
    Kind,
    Schedule,
    draw,
)
from schedules.training import STEPS, seen, undisturbed
from schedules.verdict import SOON, complaints

SEEDS = range(600)
ELEMENTS = 5


def test_all_that_can_happen_is_drawn() -> None:
    faults = [(draw(seed).kind, fault) for seed in SEEDS for fault in draw(seed).faults]
    assert {(kind, fault.act) for kind, fault in faults} == {
        (kind, act)
        for kind in Kind
        for act in Act
        if (kind.wired or act not in (Act.WEATHER, Act.POWER))
        and (kind.elastic or act not in (Act.TERM, Act.POWER))
    }
    assert {fault.step for _, fault in faults} == {BEGIN, *range(STEPS + 1)}
    for name in ("loss", "duplicate", "reorder", "delay", "jitter", "cut"):
        assert any(getattr(fault.weather, name) for _, fault in faults), name
    cuts = {fault.weather.cut for _, fault in faults}
    both = ((0, 1), (1, 0)), ((0, 1), (2, 1), (1, 0), (1, 2))
    assert cuts >= {(), ((0, 1),), ((1, 0),), ((0, 1), (2, 1)), *both}


KILLED = Fault(3, 0.0, Act.KILL, 1)
CUT = Fault(3, 0.0, Act.WEATHER, WIRE, 1.0, weather=Weather(cut=((0, 1),)))
TEXT = "allreduce 'x': rank 1 (pid 7 on a) died; see its own output for the reason"


def told(rank: int, what: str, at: float = 1.0, **words: object) -> Told:
    return Told(at, 10 + rank, rank, what, words)


def error(text: str = TEXT, at: float = 1.0, typed: bool = True) -> Told:
    return told(0, "error", at, typed=typed, type="PeerError", text=text)


def done(rank: int, **words: Any) -> Told:
    right: dict[str, Any] = {"size": 2, "digest": undisturbed(ELEMENTS), "seen": seen()}
    return told(rank, "done", **{**right, **words})


def judged(fault: Fault, *words: Told, kind: Kind = Kind.FORK, **more: Any) -> str:
    """The complaints about a job of two ranks; rank 1 is the victim, if it was killed."""
    begun = [told(0, "begin", 0.0), told(1, "begin", 0.0)]
    victims = {11} if fault.act is Act.KILL else set[int]()
    outcome = Outcome([*begun, *words], [], victims, **{"code": 0, "last": 0.5, **more})
    return "\n".join(complaints(Schedule(0, kind, (2,), ELEMENTS, 2, 0.0, (fault,)), outcome))


def test_ends_that_are_right() -> None:
    assert not judged(KILLED, error(), code=1)
    assert not judged(KILLED, error("the connection to ranks 0, 1-3 has ended; remedy: try it"))
    assert not judged(KILLED, done(0))
    assert not judged(CUT, done(0), done(1), kind=Kind.HOSTS)
    assert not judged(KILLED, kind=Kind.MPIRUN, out="prterun: rank 1 ended on signal 9")
    assert not judged(KILLED, error(), done(0), done(1), kind=Kind.ELASTIC)


WRONG = {
    "it hangs": lambda: judged(KILLED, error(), hung="stacks"),
    "processes left": lambda: judged(KILLED, error(), left="processes left: 12"),
    "other bits": lambda: judged(KILLED, done(0, digest="0123")),
    "counted samples otherwise": lambda: judged(KILLED, done(0, seen=[*seen(), 3])),
    "raised PeerError": lambda: judged(KILLED, error(typed=False)),
    "does not name the rank": lambda: judged(KILLED, error("rank 0 died; see its own output")),
    "names no remedy": lambda: judged(KILLED, error("rank 1 is gone")),
    "ended without a word": lambda: judged(KILLED),
    "heard of it after": lambda: judged(KILLED, error(at=0.6 + SOON)),
    "of 2 ranks these have finished": lambda: judged(CUT, done(0), kind=Kind.HOSTS),
    "have finished: {11: 2}": lambda: judged(CUT, error(), done(1), kind=Kind.ELASTIC),
    "the exit code is 1": lambda: judged(CUT, done(0), done(1), kind=Kind.ELASTIC, code=1),
}


@pytest.mark.parametrize("what", WRONG)
def test_ends_that_are_wrong(what: str) -> None:
    assert what in WRONG[what]()
