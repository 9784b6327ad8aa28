# SPDX-License-Identifier: Apache-2.0
"""What the processes of an elastic job tell each other, what its journal keeps, and how its ranks
meet."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from farandole.errors import CheckpointError
from farandole.launch.journal import FileJournal, contact
from farandole.launch.meetings import Meetings
from farandole.membership.journal import Record, Unready
from farandole.membership.words import (
    Commit,
    End,
    Rank,
    Standing,
    Status,
    View,
    Wanted,
    World,
    decode,
    encode,
)

T = TypeVar("T")


def journal_in(folder: Path, key: str = "00") -> FileJournal:
    return FileJournal(folder, f"/{key}", key, print, lambda: None)


def asked(question: Callable[[], T]) -> T:
    """Its answer, when the disk has given it."""
    while True:
        with contextlib.suppress(Unready):
            return question()


WORDS = [
    World(3, ("a", "b+"), Commit(2, 7), True),
    View(World(1, ("a",)), 1, 1, 1, True, 2),
    Standing(1, True, 1, Commit(1, 2), 1, True, True),
    Status("a", 3, "h", 2, (Rank("x", said=End.WELL), Rank("y", Standing(), End.LOST, "ü", -9))),
    Status("a", 4, "h", 2, (), True),
    Wanted(1, 2, 3, ("x",), View()),
    Record(4, World(2, ("a",)), 1, True),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_words_as_text(word: Any) -> None:
    kind, text = type(word), encode(word)
    assert decode(kind, text) == word
    fields = json.loads(text)
    for garbage in ("", "{", "null", "7", "[]", "[" * 100_000, json.dumps([*fields, 1])):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(kind, garbage)
    for place in range(len(fields)):
        wrong = [*fields]
        wrong[place] = {"no": "such"}
        with pytest.raises(ValueError):  # noqa: PT011
            decode(kind, json.dumps(wrong))


def test_terms_of_the_journal(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    assert contact(folder) is None
    first, second = (journal_in(folder, key) for key in ("01", "02"))
    record = first.take()
    assert record == Record(1)
    found = contact(folder)
    assert found is not None
    address, key, secret = found
    assert (address, key, len(secret)) == ("/01", "01", 64)
    world = World(1, ("1.1", "1.2"))
    assert asked(lambda: first.write(record._replace(world=world)))
    assert second.take() == Record(2, world)
    while (first.term(), second.term()) != (2, 2):
        pass
    late = record._replace(world=World(2))
    assert not asked(lambda: first.write(late)), "another one has taken over"
    assert contact(folder) == ("/02", "02", secret), "the ranks' secret outlives a supervisor"
    second.close()
    assert contact(folder) is None
    third = journal_in(folder, "03").take()
    assert third == Record(3, World(1)), "nobody lives; the numbers go on"
    assert (folder / "job.json").stat().st_mode & 0o777 == 0o600


def test_supervisors_take_terms_in_turn(tmp_path: Path) -> None:
    """At once, in many processes: no term is given twice."""
    program = (
        "import sys; from pathlib import Path; from farandole.launch.journal import FileJournal\n"
        "journal = FileJournal(Path(sys.argv[1]), '@', '00', print, print)\n"
        "print(*(journal.take().term for _ in range(20)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "job")]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    terms = [int(word) for each in several for word in each.communicate()[0].split()]
    assert sorted(terms) == list(range(1, 81))


@pytest.mark.parametrize("text", ["{", "[1]", '{"closed": false, "record": "[7]"}'])
def test_a_journal_that_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    (tmp_path / "job.json").chmod(0o600)
    with pytest.raises(CheckpointError, match=r"job\.json is damaged"):
        journal_in(tmp_path).take()


def test_a_folder_of_others_holds_no_journal(tmp_path: Path) -> None:
    """Whoever may write there could tell agents what to start."""
    folder = tmp_path / "job"
    journal_in(folder).take()
    folder.chmod(0o777)
    for opens in (journal_in(folder, "01").take, lambda: contact(folder)):
        with pytest.raises(CheckpointError, match="chmod go-w"):
            opens()


def test_meetings() -> None:
    meetings: Meetings[str] = Meetings()
    meetings.begin(World(1, ("x", "y")))
    meetings.put("a", "x", 1, 1, "of x")
    meetings.put("b", "z", 1, 1, "of a stranger")
    meetings.put("b", "y", 2, 1, "too early")
    assert meetings.answers() == []
    meetings.put("b", "y", 1, 1, "of y")
    answer = ["met", 1, 1, {"x": "of x", "y": "of y"}]
    assert meetings.answers() == [("a", answer), ("b", answer)]
    assert meetings.answers() == [], "once"
    meetings.put("b", "y", 1, 1, "of y")
    assert meetings.answers() == [("b", answer)], "what comes twice is answered twice"
    meetings.begin(World(2, ("y",)))
    meetings.put("a", "x", 1, 2, "too late")
    meetings.begin(World(1, ("x", "y")))
    meetings.put("b", "y", 2, 1, "mine")
    assert meetings.answers() == [("b", ["met", 2, 1, {"y": "mine"}])]
