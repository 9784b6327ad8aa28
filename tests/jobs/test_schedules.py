# SPDX-License-Identifier: Apache-2.0
"""Elastic training where ranks die and join as hypothesis draws it: no job hangs, leaves anything
behind, or ends with other bits than one without deaths. `make test-examples` draws 200."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.supervised import SupervisedJob
from harness.worlds import WORLDS, check

QUICK, LONG = 5, 200
PLACES = ("step", "commit", "end", "reset", "sync")


class Death(NamedTuple):
    """Of a rank, modulo the ranks that there are, where the state has made `when` steps, or, at a
    world's beginning, where that is world `when`."""

    place: str
    when: int
    rank: int


class Schedule(NamedTuple):
    """Of one job. `grows`: the steps at which all wait until there are `ranks` again."""

    ranks: int
    grows: list[int]
    deaths: list[Death]


DEATHS = st.builds(Death, st.sampled_from(PLACES[:2]), st.integers(0, 11), st.integers(0, 3))
DEATHS |= st.builds(Death, st.just("end"), st.just(12), st.integers(0, 3))
DEATHS |= st.builds(Death, st.sampled_from(PLACES[3:]), st.integers(2, 5), st.integers(0, 3))
SCHEDULES = st.builds(
    Schedule,
    st.integers(1, 4),
    st.lists(st.integers(0, 11), max_size=2),
    st.lists(DEATHS, max_size=4, unique=True),
)

# Each death happens once. Those that would leave nobody with the state are left out: at a world's
# beginning, and in its first step, only rank 0 may have it.
PROGRAM = """
DEATHS = {deaths!r}
first_steps = {{}}

def dies(place, state):
    begins = place in ("reset", "sync")
    when = state.world if begins else state.steps
    fresh = begins or state.steps == first_steps.setdefault(state.world, state.steps)
    due = {{i: rank % fd.size() for i, (p, w, rank) in enumerate(DEATHS)
           if (p, w) == (place, when) and not (FOLDER / f"death-{{i}}").exists()}}
    victims = {{i: rank for i, rank in due.items() if rank > 0 or not fresh}}
    if fd.rank() in victims.values() and len(set(victims.values())) < fd.size():
        [first(f"death-{{i}}") for i, rank in victims.items() if rank == fd.rank()]
        die()

main()
"""


# A few draws may miss these: deaths that meet each other or a rank that joins.
KNOWN = {
    "in a commit": Schedule(4, [], [Death("commit", 5, 0), Death("commit", 8, 2)]),
    "two at once": Schedule(4, [], [Death("step", 4, 0), Death("step", 4, 2)]),
    "at the end": Schedule(4, [], [Death("end", 12, 0), Death("end", 12, 2)]),
    "a new rank's step": Schedule(3, [6, 11], [Death("step", 1, 1), Death("step", 7, 2)]),
    "a new rank's sync": Schedule(3, [6, 11], [Death("step", 1, 1), Death("sync", 3, 2)]),
    "a new rank's reset": Schedule(3, [6, 11], [Death("step", 1, 1), Death("reset", 3, 2)]),
    "rank 0 as one joins": Schedule(3, [9], [Death("step", 0, 1), Death("step", 1, 0)]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_schedules(name: str) -> None:
    run(KNOWN[name])


@settings(
    max_examples=QUICK if settings.default.max_examples < 1000 else LONG,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # jobs are too slow to look for a simpler schedule
)
@given(schedule=SCHEDULES)
def test_any_schedule(schedule: Schedule) -> None:
    run(schedule)


def run(schedule: Schedule) -> None:
    env = {"SIZES": json.dumps(dict.fromkeys(schedule.grows, schedule.ranks))}
    options = ["-np", str(schedule.ranks), "--min-np", "1", "--restarts", "9"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        deaths = [tuple(death) for death in schedule.deaths]
        path.write_text(WORLDS + PROGRAM.format(deaths=deaths))
        options += ["--checkpoint-dir", folder]
        with SupervisedJob(options, [sys.executable, str(path)], env) as job:
            check(job.finish().check().out)
