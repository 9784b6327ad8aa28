# SPDX-License-Identifier: Apache-2.0
"""Random programs against the model: a minute in all; `make test-strangers` goes on for longer.

STRANGERS_RANKS=2,3 are the sizes, STRANGERS_SECONDS the search of each test, SEED its examples,
STRANGERS_SHRINK the seconds that a failing program is made smaller for. The first failure
ends a search, and prints the command that runs its program again.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from harness.seed import SEED
from strangers.loops import Loop
from strangers.plan import plan
from strangers.program import Program
from strangers.strategies import loops, programs
from strangers.verdict import Failure
from strangers.world import World

ROOT = Path(__file__).resolve().parents[2]
RANKS = [int(size) for size in os.environ.get("STRANGERS_RANKS", "2,3").split(",")]
SECONDS = float(os.environ.get("STRANGERS_SECONDS", "15"))
SHRINK = float(os.environ.get("STRANGERS_SHRINK", "30"))
_ROUND = 200  # examples of one seed
_WORN = 300  # programs that the same ranks run
STRATEGIES = {"calls": programs, "loops": loops}

SETTINGS = settings(
    max_examples=_ROUND,
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class _Search:
    """One strategy at one size, seed by seed, until time is up or a program fails, which is made
    smaller. The same search runs the same programs again, one after the other."""

    def __init__(self, world: World, kind: str) -> None:
        self._world = world
        self._kind = kind
        self._began = time.monotonic()
        self._end = self._began + SECONDS
        self._examples = 0
        self._found = ""  # how the first failure came
        self._failed: dict[str, Failure] = {}

    def run(self) -> None:
        """Raises the failure of the smallest program."""
        for number in itertools.count(1000 * SEED):
            self._round(number)
            if time.monotonic() > self._end:
                break
        print(f"{self._examples} programs at {self._world.ranks} ranks, seeds to {number}")

    def _round(self, number: int) -> None:
        """The examples of one seed."""

        @seeded(number)
        @SETTINGS
        @given(STRATEGIES[self._kind]())
        def check(program: Program | Loop) -> None:
            self._check(program, number)

        check()

    def _check(self, program: Program | Loop, number: int) -> None:
        if isinstance(program, Program):
            plan(program, self._world.ranks)  # an error in it is not farandole's
        text = program.text()
        if text in self._failed:
            raise self._failed[text]
        if time.monotonic() > self._end:
            return
        self._examples += 1
        if self._examples % _WORN == 0:
            self._world.end()
        try:
            self._world.run(program)
        except Failure as failure:
            if not self._found:
                passed = time.monotonic() - self._began
                self._found = f"example {self._examples}, {passed:.0f} s, seed {number}"
                self._end = time.monotonic() + SHRINK
            self._failed[text] = self._told(text, failure)
            raise self._failed[text] from None

    def _told(self, text: str, failure: Failure) -> Failure:
        size, folder = self._world.ranks, ROOT / "build" / "strangers"
        path = folder / f"{self._kind}-{size}-{type(failure).__name__}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        place = path.relative_to(ROOT)
        return type(failure)(
            f"found at {size} ranks: {self._found}\n{failure}\nprogram, in {place} too: {text}\n"
            f"once more: PYTHONPATH=tests .venv/bin/python -m strangers.again {size} {place}\n"
            "if that is well, it needs what had run before: search once more"
        )


@pytest.mark.timeout(0)  # a failure shrinks for some minutes
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("size", RANKS)
def test_strangers(kind: str, size: int) -> None:
    found = ""
    try:
        with World(size) as world:
            _Search(world, kind).run()
    except Failure as one:
        found = f"{type(one).__name__}: {one}"
    if found:
        pytest.fail(found, pytrace=False)
