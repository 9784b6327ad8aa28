# SPDX-License-Identifier: Apache-2.0
"""Random programs against the model: a minute in all; `make test-strangers` goes on for longer.

STRANGERS_RANKS=2,3 are the sizes, STRANGERS_SECONDS the search of each test, STRANGERS_SEED its
examples, STRANGERS_SHRINK the seconds that a failing program is made smaller for, and
STRANGERS_WITHOUT=join,drop the features (see program and loops) that are left out. A failure prints
the command that runs its program again.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from strangers.environment import ranks, seconds, seed, shrinking, without
from strangers.loops import Loop
from strangers.plan import plan
from strangers.program import Program
from strangers.strategies import Strategy, loops, programs
from strangers.verdict import Failure
from strangers.world import World

ROOT = Path(__file__).resolve().parents[2]
_ROUND = 200  # examples of one seed
_WORN = 300  # programs that the same ranks run
_TRIES = 3  # in new ranks, before a failure counts as one that needs what was run before
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
    """One strategy at one size, seed by seed, and the first failure made smaller."""

    def __init__(self, world: World, kind: str) -> None:
        self._world = world
        self._kind = kind
        self._once: list[Failure] = []  # that did not come again
        self._serial = 0  # of the failure that is looked for
        self._began = time.monotonic()
        self._end = self._began + seconds()
        self._examples = 0
        self._history: list[Program | Loop] = []
        self._found = ""  # how the first failure came
        self._found_at = self._shrinks_until = 0.0
        self._failed: dict[str, Failure] = {}

    def run(self) -> list[Failure]:
        """What is found until time is up. What a failing program has used is then left out, so that
        one defect does not hide the next."""
        failures: list[Failure] = []
        excluded = without()
        for number in itertools.count(1000 * seed()):
            try:
                self._round(number, STRATEGIES[self._kind](excluded))
            except Failure as failure:
                failures.append(failure)
                used = failure.program.features(self._world.ranks) if failure.program else ()
                if not used:
                    break
                excluded |= set(used)
                self._end += time.monotonic() - self._found_at
                self._found, self._serial = "", self._serial + 1
                self._failed.clear()
            if time.monotonic() > self._end:
                break
        print(f"{self._examples} programs at {self._world.ranks} ranks, seeds to {number}")
        return failures + self._once

    def _round(self, number: int, strategy: Strategy) -> None:
        """The examples of one seed."""

        @seeded(number)
        @SETTINGS
        @given(strategy)
        def check(program: Program | Loop) -> None:
            self._check(program, number)

        check()

    def _check(self, program: Program | Loop, number: int) -> None:
        if isinstance(program, Program):
            plan(program, self._world.ranks)  # an error in it is not farandole's
        text = program.text()
        if text in self._failed:
            raise self._failed[text]
        if time.monotonic() > (self._shrinks_until if self._found else self._end):
            return
        self._examples += 1
        failure = self._run(program)
        if failure is None:
            return
        passed = time.monotonic() - self._began
        how = (
            f"at {self._world.ranks} ranks: example {self._examples}, {passed:.0f} s, seed {number}"
        )
        if not self._fails_alone(program):
            if not self._found:
                self._once.append(self._with_history(how, failure))
            return
        if not self._found:
            self._found = how
            self._found_at = time.monotonic()
            self._shrinks_until = self._found_at + shrinking()
        self._failed[text] = self._told(program, failure)
        raise self._failed[text]

    def _run(self, program: Program | Loop) -> Failure | None:
        """In ranks that may have run others before."""
        if len(self._history) >= _WORN:
            self._world.end()
            self._history.clear()
        self._history.append(program)
        try:
            self._world.run(program)
        except Failure as failure:
            return failure
        return None

    def _fails_alone(self, program: Program | Loop) -> bool:
        """Whether it fails in new ranks, too."""
        if len(self._history) == 1:
            self._history.clear()
            return True
        for _ in range(1 if self._found else _TRIES):
            try:
                self._world.run(program)
            except Failure:
                self._history.clear()
                return True
            self._world.end()
        return False

    def _with_history(self, how: str, failure: Failure) -> Failure:
        name = f"{self._kind}-{self._world.ranks}-history-{len(self._once)}.json"
        path = _write(name, "".join(f"{one.text()}\n" for one in self._history))
        self._history.clear()
        return type(failure)(
            f"found {how}, and not again by the program alone; {path} holds what these ranks had "
            f"run before, and it at the end\n{failure}"
        )

    def _told(self, program: Program | Loop, failure: Failure) -> Failure:
        size, text = self._world.ranks, program.text()
        path = _write(
            f"{self._kind}-{size}-{self._serial}-{type(failure).__name__}.json", f"{text}\n"
        )
        told = type(failure)(
            f"found {self._found}\n{failure}\nthe program, which is in {path} too: {text}\n"
            f"once more: PYTHONPATH=tests .venv/bin/python -m strangers.again {size} {path}"
        )
        told.program = program
        return told


def _write(name: str, text: str) -> Path:
    folder = ROOT / "build" / "strangers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return (folder / name).relative_to(ROOT)


@pytest.mark.timeout(0)  # a failure shrinks for some minutes
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("size", ranks())
def test_strangers(kind: str, size: int) -> None:
    with World(size) as world:
        failures = _Search(world, kind).run()
    if failures:
        text = "\n\n".join(f"{type(one).__name__}: {one}" for one in failures)
        pytest.fail(f"{len(failures)} defects\n{text}", pytrace=False)
