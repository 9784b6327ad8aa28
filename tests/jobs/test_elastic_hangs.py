# SPDX-License-Identifier: Apache-2.0
"""`farandole run --elastic` when ranks are stopped or hang, and when processes that shall join do
not come: the others do not wait for them for long, and nothing of them lives on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.supervised import SupervisedJob
from harness.worlds import check, training, worlds

Start = Callable[..., SupervisedJob]
LIMITS = {
    "FARANDOLE_STALL_WARN": "1",
    "FARANDOLE_STALL_ABORT": "3",
    "FARANDOLE_INIT_TIMEOUT": "15",
    "FARANDOLE_CHECKPOINT_SECONDS": "0",
}
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
LOOPS = "exec('while True: pass')"
DIES = "place == 'step' and rank == 1 and step == 1 and first('1')"


def hangs(victims: set[int], how: str) -> str:
    """A training in which these ranks hang once, after the fifth commit."""
    return training(
        f"if fd.rank() in {victims} and state.steps == 5 and first(str(fd.rank())): {how}"
    )


@pytest.mark.parametrize(
    ("ranks", "victims", "how"),
    [(2, {1}, LOOPS), (2, {0}, LOOPS), (3, {1, 2}, STOPS)],
    ids=["1 of 2 loops", "rank 0 loops", "2 of 3 stopped"],
)
def test_ranks_that_hang(elastic_ranks: Start, ranks: int, victims: set[int], how: str) -> None:
    """The others wait for them in a collective. The supervisor ends them, and others come."""
    out = elastic_ranks(hangs(victims, how), ranks, **LIMITS).finish().check().out
    for victim in victims:
        assert re.search(rf"rank {victim} on \S+ (hangs|was killed)", out), out
    assert f"world 2: {ranks} ranks from commit 5\n" in out
    check(out, ranks)


def test_all_ranks_stopped(elastic_ranks: Start) -> None:
    """Nobody is left to say so, but the agent."""
    out = elastic_ranks(hangs({0, 1}, STOPS), 2, **LIMITS).finish().check().out
    assert "has been stopped for 3 s: killed" in out
    check(out, 2)


def test_a_rank_that_hangs_in_a_restart(elastic_ranks: Start) -> None:
    """All have left the world; one does not come to the next."""
    event = "if state.steps == 5 and first(str(fd.rank())): raise fd.LibraryError('a broken cable')"
    hang = f"\nif fd.rank() == 1 and first('2'): runtime.init = lambda *_: exec({LOOPS!r})\n"
    source = training(event).replace("\nmain()", f"\nfrom farandole import runtime{hang}main()")
    out = elastic_ranks(source, 2, **LIMITS).finish().check().out
    assert "world 2: 2 ranks from commit 5\n" in out
    check(out, 2)


# ---- processes that shall join


@pytest.mark.parametrize(
    ("joins", "late"),
    [
        ("signal.pause()", ""),
        ("pass", "if fd.size() == 1: " + STOPS),
        ("import farandole.runtime as r; r.init = lambda *_: signal.pause()", ""),
    ],
    ids=["before init", "before training", "in init"],
)
def test_one_that_does_not_join(elastic_ranks: Start, joins: str, late: str) -> None:
    """Training does not wait for it, and it is gone at the end."""
    source = worlds(DIES, late, joins)
    check(elastic_ranks(source, 3, "--min-np", "1", **LIMITS).finish().check().out, 2, 2)


@pytest.mark.parametrize("place", ["sync", "reset"])
def test_one_that_stops_while_it_is_taken_in(
    elastic_ranks: Start, tmp_path: Path, place: str
) -> None:
    """As any rank that is stopped it is ended, and the others go on."""
    late = f"""
dies_ = dies
def dies(place, state):
    dies_(place, state)
    if place == {place!r} and state.world == 3 and rank_joins and first("2"):
        {STOPS}
"""
    late += "rank_joins = os.environ['FARANDOLE_AGENT'].endswith('+')\n"
    source = worlds(DIES, late)
    result = elastic_ranks(source, 3, "--min-np", "1", SIZES='{"6": 3}', **LIMITS).finish().check()
    check(result.out, 3)
    assert (tmp_path / "2").exists()
